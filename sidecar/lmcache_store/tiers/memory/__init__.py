"""The memory tier: one arena, its index, its leases and its eviction order.

Shared memory: ``arena`` is the file, ``opening`` and ``growth`` take memory for it, ``private`` is an arena
without clients, and ``layout``, ``slots`` and ``shared_index`` are its tables. ``mapping`` is a client's
view. Rows: ``rows`` and ``row_index`` hold them, ``allocator`` finds free slots, ``quotas`` bounds tenants,
``leases`` protects what a request reads, ``adoption`` takes over rows after a restart. ``tier`` and
``reservations`` are the tier for an event loop, and ``local`` is the tier for threads.

The sidecar reuses a slot that a client wrote only after one of three events. The client returned the slot, or
is proven dead, or reported that none of its copies belongs to an old epoch. Until then the slot is in
quarantine (ADR 1). The kernel gets memory back only when no process has it pinned any more (ADR 34). If a
process changes the length of the file, loads are misses, and the sidecar replaces the file (ADR 54).
"""
