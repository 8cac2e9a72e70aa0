"""Copies of the engines' stores by the sidecar, which reads GPU memory in separate processes.

``copier`` decides for which clients the sidecar copies. Each ``gpu`` has ``members`` (its clients),
``jobs`` and ``batches``. ``process`` is the sidecar's side of the ``reader``, the program that reads one
GPU; they exchange ``messages``. ``pages`` translates blocks into addresses.

The sidecar only reads the engine's memory, which the engine alone writes. A slot is not reused until its copy
has ended, or the process that copies has been reaped. After a fault the engine makes its own copies, and
``/stats`` gives the reason.
"""
