"""Reads of rows from the memory tiers of other pods, which ``lmcache_sidecar.peer_server`` serves.

``tier`` is a lower tier over the other pods, each of which is a ``peer``. ``hand_over`` offers the rows of a
stopping pod.
"""
