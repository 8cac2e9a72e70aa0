"""Explains lookups: where each token of a prompt came from, and why the rest was computed.

``causes`` counts tokens, with ``sources`` of chunks. ``open_requests`` waits
for the times of requests, ``requests`` remembers recent ones, and ``request_times`` and ``benefit_stats``
are figures.
"""
