"""Policy: how large a cache tier should be. Pure: no client, no clock, no state of its own.

``traffic`` holds the curves and figures of a cluster's lookups. ``tier`` computes what a size of one tier
saves and costs, in USD per hour. ``decide`` turns both into a decision with its reason, and into the state
for the next decision: ``verify`` checks the last step, ``choose`` picks a size. ``report`` is the decision
as the status and the ConfigMap store it.
"""

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
"""Durations in seconds."""
