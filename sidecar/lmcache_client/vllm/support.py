"""Supported versions of vLLM."""

from __future__ import annotations

from lmcache_client.errors import UnsupportedError

SUPPORTED_VERSIONS = ("0.29", "0.30", "0.31", "0.32", "0.33")


def check_version(version: str) -> None:
    """Raise UnsupportedError for a version that was not tested.

    The connector depends on when a version reuses blocks and what their bytes mean. Both have changed between
    minor releases, and a wrong assumption causes wrong KV, not a miss.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"vLLM {version} is not supported (supported: {', '.join(SUPPORTED_VERSIONS)}); "
            "upgrade LMCache Cluster, or run a version of vLLM that it supports"
        )
