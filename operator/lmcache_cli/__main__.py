"""The command line ``kubectl lmcache``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lmcache_cli.commands import COMMANDS
from lmcache_operator import __version__, manifests
from lmcache_store.common.options import Parser, describe


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if not os.environ.get("KUBECONFIG"):
        os.environ.pop("KUBECONFIG", None)  # as for kubectl, an empty variable is not set
    if not words:
        _parser(words).print_help(sys.stderr)
        return 2
    arguments = _parser(words).parse_args(words)
    return int(arguments.command(arguments))


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    about = "Answers questions about LMCacheClusters, and prints the objects that they become."
    parser = Parser(prog="kubectl lmcache")
    describe(parser, about, "", "status", "doctor -n team")
    parser.add_argument("--version", action="version", version=f"kubectl-lmcache {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in words:  # importing the client takes half a second, which other commands need not spend
            import_module(f"lmcache_cli.commands.{name}").add_arguments(command)
    manifests.add_commands(commands, manifests.rendering_options())
    return parser


if __name__ == "__main__":
    sys.exit(main())
