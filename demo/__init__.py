"""``make demo``: the main use case with real engines, Redis and Kubernetes, and output to read."""
