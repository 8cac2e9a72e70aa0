"""Parts for engines that look up, load and store whole pages on threads of their own.

``blocking`` is the access to the sidecar, ``page_requests`` are lookups with leased rows, and ``lineage``
names chains of pages that are stored in several calls.
"""
