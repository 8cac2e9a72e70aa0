"""The daemon beside each engine: owns the arena, answers the engine, writes through to lower tiers."""
