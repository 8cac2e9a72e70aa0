"""``make demo``: the main job on real parts, with something to look at."""
