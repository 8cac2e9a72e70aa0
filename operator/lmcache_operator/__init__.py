"""The LMCache Cluster operator: turns LMCacheClusters into running, healthy engine pods."""

from __future__ import annotations

__version__ = "0.1.0"
