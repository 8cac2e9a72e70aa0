"""The memory tier: one arena, its index, its leases and its order of eviction."""
