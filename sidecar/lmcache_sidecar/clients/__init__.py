"""Clients of the sidecar: their registry, the checks of their messages, and the proof of their death.

``registry`` knows the clients and their epochs, ``validation`` parses messages, ``offers`` checks offers of
GPU memory, and ``liveness`` proves that a client is dead.
"""
