"""A thin layer over the CUDA driver API: devices, streams, events, pins, IPC memory, batches of copies.

It does not need torch. ``cuda-bindings`` is imported at the first use of the driver. ``driver`` makes
checked calls, ``copies`` is a batch of copies, ``ipc`` opens memory of other processes, ``pins`` and
``pin_status`` are about pinned host memory, and ``errors`` gives each error its remedy.
"""
