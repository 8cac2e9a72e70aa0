"""How large should a cache tier be? Pure: no client, no clock, no state of its own.

``traffic`` holds what is known of a cluster's lookups: curves, and what was measured. ``tier`` says what a
size of one tier saves and costs, in money per hour. ``decide`` turns both into a decision with its reason,
and into the state that the next decision starts from.
"""
