"""Parts for engines that look up, load and store whole pages on threads of their own.

``blocking`` is the access to the sidecar, and ``page_requests`` are lookups with leased rows.
"""
