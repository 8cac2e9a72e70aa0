"""Samples of lookups: polled from sidecars, checked, and merged into one stream per cluster."""
