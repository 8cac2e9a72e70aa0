"""The memory tier: one arena, its index, its leases and its eviction order."""
