"""Clients of the sidecar: their registry, the checks of their messages, and the proof of their death."""
