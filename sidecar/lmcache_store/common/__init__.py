"""Helpers that every part may use and that do not depend on the cache.

Data: ``units`` (sizes and durations), ``options``, ``prices``, ``text`` and ``terminal`` (printing),
``recent`` (a bounded dictionary) and ``fair_queue`` (clients or tenants take turns). Time: ``backoff``, and
``timing`` with the deadlines of engine and sidecar. Machine: ``sockets`` (a stream with deadlines),
``threads``, ``numa`` (cores and memory of a node), ``nontemporal`` (copies past the processor's caches).
"""
