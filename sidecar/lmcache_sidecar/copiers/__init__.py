"""Copies of the engines' stores by the sidecar, which reads GPU memory in separate processes.

``copier`` decides for which clients the sidecar copies. Each ``gpu`` has ``members`` (its clients),
``jobs`` and ``batches``. ``process`` is the sidecar's side of the ``reader``, the program that reads one
GPU; they exchange ``messages``. ``pages`` translates blocks into addresses.
"""
