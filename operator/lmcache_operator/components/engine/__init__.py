"""The engine pods of a cluster, each with a sidecar, and what belongs to them."""
