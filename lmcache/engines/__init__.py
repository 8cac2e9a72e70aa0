"""Engine connectors: each reads and writes one engine's KV cache."""
