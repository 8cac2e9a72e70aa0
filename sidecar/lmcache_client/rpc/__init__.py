"""Protocol between engine and sidecar: messages (``kvcache.proto``), generated code and a typed client.

``client`` holds an ``attachment`` (the stream that proves that a client is alive) and makes a ``session``
of calls from it. ``service`` has names, limits and versions, and ``open_copies`` the copies that a client has
open.

A load reads the index, copies, and takes a lease until ``Release``. A store calls ``Reserve``, copies, and
calls ``Commit`` or ``Abort``. A refused call changes nothing. Every message carries its epoch, and the
sidecar refuses stale epochs.
"""
