"""The CUDA driver API, thinly: devices, streams, events, pinned memory, memory of other processes, copies.

Nothing here needs torch. ``cuda-bindings`` is imported when the driver is first asked for.
"""
