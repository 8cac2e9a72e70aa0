"""A thin layer over the CUDA driver API: devices, streams, events, pins, IPC memory, batches of copies.

It does not need torch. ``cuda-bindings`` is imported at the first use of the driver.
"""
