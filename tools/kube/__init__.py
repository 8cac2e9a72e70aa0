"""Kubernetes binaries, built and cached, and the schemas that they export."""
