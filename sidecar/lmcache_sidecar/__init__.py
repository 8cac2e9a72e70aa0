"""The daemon beside each engine: owns the arena, answers lookups and stores, writes through to lower tiers."""
