"""Copies of the engines' stores by the sidecar, which reads GPU memory in separate processes."""
