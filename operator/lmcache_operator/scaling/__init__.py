"""Watches what clusters look up, and finds how large their tiers should be.

``answers`` reads what sidecars say, and refuses what makes no sense. ``sizing`` makes curves and decisions of
it, one for each cluster; it has no clock but the times it is given. ``poller`` asks sidecars and tells the
reconciler.
"""
