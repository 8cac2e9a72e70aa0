"""A local Kubernetes control plane, and processes for its pods."""
