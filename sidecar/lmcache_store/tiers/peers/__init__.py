"""Reads of rows from the memory tiers of other pods.

``server`` serves a pod's own rows: a ``session`` for each connection, within ``limits``. ``tier`` is a
lower tier over the other pods, each of which is a ``peer``. ``hand_over`` offers the rows of a stopping
pod.
"""
