"""The pods of a cluster: their state, and the steps that are due for them. Pure."""
