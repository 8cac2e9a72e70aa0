"""Reads of rows from the memory tiers of other pods: the server of a pod's own rows, and a lower tier over
the servers of the other pods.
"""
