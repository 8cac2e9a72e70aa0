"""Which versions of vLLM are supported, and where what we say stands."""

from __future__ import annotations

import logging

from lmcache.engines.errors import UnsupportedError

SUPPORTED_VERSIONS = ("0.29", "0.30", "0.31", "0.32", "0.33")

for _handler in logging.getLogger("vllm").handlers:  # what we say stands in vLLM's own log
    logging.getLogger("lmcache.engines").addHandler(_handler)


def check_version(version: str) -> None:
    """Raise UnsupportedError for a version that nobody has tried.

    To run with it would be a bet on other people's promises: when a block may be reused, what its bytes mean.
    Both have changed between minor releases, and what a wrong guess costs is wrong KV, not a miss.
    """
    if ".".join(version.split(".")[:2]) not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"vLLM {version} is not supported (supported: {', '.join(SUPPORTED_VERSIONS)}); "
            "upgrade LMCache Cluster, or run a version of vLLM that it supports"
        )
