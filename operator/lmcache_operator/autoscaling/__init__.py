"""Autoscaling of cache tiers.

``poller`` polls sidecars for samples of their lookups, and ``intake`` checks and merges the answers.
``sizing`` keeps what one cluster's tiers need to be decided on. The package ``policy`` decides, and the
component ``components.autoscaling`` stores decisions.
"""
