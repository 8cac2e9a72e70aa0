"""Real SGLang engines on machines without a GPU, for tests, demo and benchmarks."""
