"""Children that run in a peer's own environment; they import nothing of ours."""
