"""What a cluster should look like, as plain Kubernetes objects.

Everything here is a pure function of the cluster and its images: the same input gives the same bytes, in
every process, so that nothing is applied and no pod restarted without a cause.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]
"""A Kubernetes object as plain data."""

Images = dict[str, str]
"""Image by container: engine and sidecar."""
