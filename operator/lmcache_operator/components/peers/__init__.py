"""The list of a cluster's engine pods, which read each other's memory tiers, and their password."""
