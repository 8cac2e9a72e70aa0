"""Names, kinds, merging and ownership of Kubernetes objects as plain data.

All functions are pure, and the same input gives the same bytes in every process. So the operator writes no
object and restarts no pod without a cause.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as plain data."""

Images = dict[str, str]
"""Images by container (engine, sidecar)."""
