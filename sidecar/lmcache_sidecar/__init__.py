"""The sidecar of an engine: owns the arena, answers the engine's calls, writes through to lower tiers.

``command`` parses the command line and ``config`` the options. ``daemon`` is the process and ``sidecar``
assembles its parts. ``server`` receives calls, ``sessions`` carries them out. ``lower_tiers`` opens disk,
remote and peers, ``peer_server`` serves rows to other pods, ``resizing`` changes the memory tier, ``samples``
are looked-up keys.
"""
