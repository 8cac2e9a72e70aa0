"""The engine pods of a cluster, each with a sidecar, and the objects that belong to them."""
