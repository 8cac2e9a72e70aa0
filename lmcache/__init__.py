"""LMCache Cluster's library: cache engine, storage tiers, wire client and engine connectors."""

__version__ = "0.1.0"
