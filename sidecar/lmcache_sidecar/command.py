"""The command line: ``lmcache-sidecar serve``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import lmcache
from lmcache.logging import FloodFilter, set_up
from lmcache_sidecar import config as configuration
from lmcache_sidecar.config import ConfigError, Reading

_PR_SET_PDEATHSIG = 1
_SERVE = """\
Keep the KV cache of the engines in this pod: in host memory, on disk, and in a Redis tier that all pods
share.

An option is taken from its flag, else from the environment variable in [brackets], else from the file given
by --config (keys as the flags, with _ for -), else it has its default.
"""

_EXIT = """\
exit status: 0 after SIGTERM or SIGINT, 2 when it can't run (one line says why; with --stay-up true it stays).

example: lmcache-sidecar serve --memory-size 64Gi --remote-url redis://kv-remote:6379/0
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}: see {self.prog} --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="lmcache-sidecar", description="The KV-cache sidecar of an LLM engine.")
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


def _read(arguments: Sequence[str] | None) -> Reading:
    """What the command line and all other sources say. Raises ConfigError, unless the sidecar stays up."""
    flags: dict[str, str | None] = {}
    mistakes, unknown = [], []
    try:
        known, others = _parser().parse_known_args(arguments)
        flags = vars(known)
        # Without values, which may be secrets.
        names = sorted({other.partition("=")[0] for other in others if other.startswith("--")})
        unknown = [f"argument {' '.join(names)} is unknown"] if others else []
    except ConfigError as error:
        mistakes = [str(error)]
    reading = configuration.read(flags, os.environ)
    mistakes += reading.mistakes
    if reading.config.stay_up:  # and reads on: a newer operator may have written it
        return reading._replace(mistakes=tuple(mistakes), warnings=(*unknown, *reading.warnings))
    reading._replace(mistakes=(*mistakes, *unknown)).usable()
    return reading


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        reading = _read(arguments)
        set_up(reading.config.log_format, reading.config.log_level, FloodFilter())
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads, which we never use, cost 50 ms
        from lmcache_sidecar.daemon import serve

        asyncio.run(serve(reading, lambda: _read(arguments)))
    except ConfigError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(
        _PR_SET_PDEATHSIG, signal.SIGKILL
    )  # never without the parent that starts it again
    sys.exit(main())
