"""Tiers: memory, disk, remote and peers, and the tiered store that joins them. Torch-free.

``memory``, ``disk``, ``remote`` and ``peers`` do not know each other, and ``tiered`` joins them. ``base`` has
the types and contracts of all tiers, ``errors`` their errors, and ``header`` the header and checksum of
stored bytes. ``encryption`` is for rows of the lower tiers. ``circuit`` decides whether a medium is used,
``probing`` finds the leading rows that a medium holds, and ``load_or_recompute`` says whether a load is worth
it. ``policy`` is the eviction order, ``budgets`` the shares of tenants, ``stats`` the counters.
"""
