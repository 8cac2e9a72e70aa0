"""Real processes, engines and a Kubernetes control plane, for tests, the demo and the benchmarks."""
