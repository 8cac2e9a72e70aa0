"""Stores copied by the sidecar, which reads the engines' GPU memory."""
