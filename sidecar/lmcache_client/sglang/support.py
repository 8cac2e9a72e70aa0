"""Supported versions of SGLang, and the log handlers of the connector."""

from __future__ import annotations

import logging

from lmcache_client.errors import UnsupportedError

SUPPORTED_VERSIONS = ("0.5.23",)

for _handler in logging.getLogger("sglang").handlers:  # the connector's messages appear in SGLang's own log
    logging.getLogger("lmcache_client").addHandler(_handler)


def check_version(version: str | None = None) -> None:
    """Raise UnsupportedError for a version that was not tested. None: check the installed version.

    The connector depends on how a version updates weights and orders its calls. A wrong assumption would
    cause wrong KV, not a miss.
    """
    if version is None:
        import sglang

        version = str(sglang.__version__)
    if version.split("+")[0].split(".post")[0] not in SUPPORTED_VERSIONS:
        raise UnsupportedError(
            f"SGLang {version} is not supported (supported: {', '.join(SUPPORTED_VERSIONS)}); "
            "upgrade LMCache Cluster, or run a version of SGLang that it supports"
        )
