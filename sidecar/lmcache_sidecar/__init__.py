"""The sidecar of an engine: owns the arena, answers the engine's calls, writes through to lower tiers."""
