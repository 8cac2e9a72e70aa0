"""A local Kubernetes control plane for tests, the demo and the benchmarks."""
