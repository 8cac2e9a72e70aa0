"""Autoscaling of cache tiers.

``intake`` polls sidecars for samples of their lookups. ``sizing`` keeps what one cluster's tiers need to be
decided on. ``policy`` decides. ``component`` stores decisions and reports them in the status, ``metrics`` and
``tier_status`` report figures. ``show`` draws curves.
"""
