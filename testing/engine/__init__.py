"""A real, tiny engine for tests, the demo and benchmarks."""
