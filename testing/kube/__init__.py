"""A local Kubernetes control plane, and what is done to it."""
