"""The command line: ``lmcache-sidecar serve | explain | hints | top | salt-hash``."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

import lmcache_store
from lmcache_sidecar import config as configuration
from lmcache_sidecar.commands import explain as explain
from lmcache_sidecar.commands import hints
from lmcache_sidecar.config import ConfigError, ConfigReading
from lmcache_sidecar.files.tenants import print_salt_hash
from lmcache_store.common.logs import FloodFilter, set_up
from lmcache_store.common.options import Parser, about_unknown, describe

_PR_SET_PDEATHSIG = 1
_SERVE = """\
Run the KV cache of the engines in this pod: in host memory, on disk, and in a Redis tier that all pods share.

Each option comes from the first of these sources that has it: its flag, the environment variable in
[brackets], the file given by --config (keys as the flags, with _ for -), its default.
"""

_EXIT = """\
exit status: 0 after SIGTERM or SIGINT; 2 if the sidecar can't run, with one line that gives the reason. With
--stay-up true, a sidecar that can't run does not exit.
"""
_EXAMPLE = "--memory-size 64Gi --remote-url redis://kv-remote:6379/0"
_SALT = """\
Read a cache salt from standard input, and print its saltHash for --tenants-file. One newline at the end is
ignored.
"""


class _Parser(Parser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def _parser(command: str = "") -> argparse.ArgumentParser:
    parser = _Parser(prog="lmcache-sidecar")
    describe(parser, "The KV-cache sidecar of an LLM engine.", "", f"serve {_EXAMPLE}", "explain")
    parser.add_argument("--version", action="version", version=f"lmcache-sidecar {lmcache_store.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="run the sidecar")
    describe(serve, _SERVE, _EXIT, _EXAMPLE)
    parser.passes_unknown = serve.passes_unknown = True  # `_read` decides
    configuration.add_arguments(serve)
    explain.add_arguments(commands)
    hints.add_arguments(commands)
    live = commands.add_parser("top", help="show what the sidecar does at present")
    salt = commands.add_parser("salt-hash", help="print the saltHash of a cache salt")
    describe(salt, _SALT, "", "< salt.txt")
    if command == "top":
        from lmcache_sidecar.commands import top

        top.add_arguments(live)
    return parser


def _read(arguments: Sequence[str] | None) -> ConfigReading:
    """Read the options of all sources. Raises ConfigError for a mistake, unless the sidecar stays up."""
    flags: dict[str, str | None] = {}
    mistakes, unknown = [], []
    try:
        known, rest = _parser().parse_known_args(arguments)
        flags = vars(known)
        unknown = [about_unknown(rest, configuration.FLAGS)] if rest else []
    except ConfigError as error:
        mistakes = [str(error)]
    reading = configuration.read(flags, os.environ)
    mistakes += reading.mistakes
    if reading.config.stay_up:  # a newer operator may have written unknown options: ignore them
        return reading._replace(mistakes=tuple(mistakes), warnings=(*unknown, *reading.warnings))
    reading._replace(mistakes=(*mistakes, *unknown)).usable()
    return reading


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    try:
        words = sys.argv[1:] if arguments is None else [*arguments]
        if words[:1] in (["explain"], ["hints"], ["top"]):
            parsed = _parser(words[0]).parse_args(words)
            return int(parsed.run(parsed))
        if words[:1] == ["salt-hash"]:
            _parser().parse_args(words)
            return print_salt_hash()
        reading = _read(arguments)
        set_up(reading.config.log_format, reading.config.log_level, FloodFilter())
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads cost 50 ms, and are not used
        from lmcache_sidecar.daemon import serve

        asyncio.run(serve(reading, lambda: _read(arguments)))
    except ConfigError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 2
    return 0


def leave(status: int) -> NoReturn:
    """End the process at once. A stopped sidecar has released everything.

    The interpreter's shutdown can take seconds on a busy machine. No other thread runs meanwhile, so that the
    watchdog of ``lmcache_sidecar.daemon`` would end the process with status 1.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    # The sidecar must not outlive the parent that restarts it.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    leave(main())
