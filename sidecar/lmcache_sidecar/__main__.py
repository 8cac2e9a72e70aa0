"""The command line: ``lmcache-sidecar serve``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

import lmcache
from lmcache_sidecar import config as configuration
from lmcache_sidecar import logs
from lmcache_sidecar.config import ConfigError

_SERVE = """\
Keep the KV cache of the engines in this pod: in host memory, on disk, and in a Redis tier that all pods
share.

An option is taken from its flag, else from the environment variable in [brackets], else from the file given
by --config (keys as the flags, with _ for -), else it has its default.
"""

_EXIT = """\
exit status: 0 after SIGTERM or SIGINT, 2 when the configuration can't be used (one line says why).

example: lmcache-sidecar serve --memory-size 64Gi --remote-url redis://kv-remote:6379/0
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lmcache-sidecar", description="The KV-cache sidecar of an LLM engine."
    )
    parser.add_argument("--version", action="version", version=f"lmcache-sidecar {lmcache.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="run the sidecar",
        description=_SERVE,
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    configuration.add_arguments(serve)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    flags = vars(_parser().parse_args(arguments))
    try:
        config = configuration.load(flags, os.environ)
        logs.set_up(config.log_format, config.log_level)
        for sentence in configuration.suspect_variables(os.environ):
            logging.getLogger(__name__).warning("%s", sentence)
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which we never use, cost 50 ms
        from lmcache_sidecar.daemon import serve

        asyncio.run(serve(config))
    except ConfigError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
