"""The server from which the sidecars of other pods read rows of this pod's memory tier.

``server`` accepts connections, and has a ``session`` for each of them. All sessions share one ``service``.
``requests`` parses what a client sends, ``limits`` bounds what clients take, and ``rows`` finds and pins
rows. ``lmcache_store.tiers.peers`` is the client.
"""
