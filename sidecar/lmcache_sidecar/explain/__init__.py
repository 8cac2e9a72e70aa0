"""Explains lookups: where each token of a prompt came from, and why the rest was computed.

``causes`` counts tokens, with ``sources`` of chunks. ``open_requests`` waits
for the times of requests, ``requests`` remembers recent ones, and ``request_times`` and ``benefit_stats``
are figures.

The path of a cause: the connector reports how many tokens the engine had, loads and computes. ``causes`` then
gives each token one cause, from two records of the store: ``tiered.history`` (chunks that requests looked up
or stored) and ``tiered.absences`` (decisions that kept a row out of memory). The times of the request follow
with its ``Release``. A load may fail, so its tokens are counted only then.
"""
