"""The memory tier: one arena, its index, its leases and its eviction order.

Shared memory: ``arena`` is the file, ``opening`` and ``growth`` take memory for it, ``private`` is an arena
without clients, and ``layout``, ``slots`` and ``shared_index`` are its tables. ``mapping`` is a client's
view. Rows: ``rows`` and ``row_index`` hold them, ``allocator`` finds free slots, ``quotas`` bounds tenants,
``leases`` protects what a request reads, ``adoption`` takes over rows after a restart. ``tier`` and
``reservations`` are the tier for an event loop, and ``local`` is the tier for threads.
"""
