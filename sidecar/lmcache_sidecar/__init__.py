"""The sidecar of an engine: owns the arena, answers the engine's calls, writes through to lower tiers.

``command`` parses the command line and ``config`` the options. ``daemon`` is the process and ``sidecar``
assembles its parts. ``server`` receives calls, ``clients`` checks them, and ``sessions`` carries them out.
``copiers`` reads the memory of GPUs. ``lower_tiers`` opens disk, remote and peers, ``peer_server`` serves
rows to other pods, ``resizing`` changes the size of the memory tier, and ``files`` reads mounted files again
when they change.

These modules have to do with figures: ``samples`` records looked-up keys, ``explain`` counts prompt tokens
by their source, or by the reason why they were computed, ``pages`` serves all figures over HTTP, and
``commands`` prints them.
"""
