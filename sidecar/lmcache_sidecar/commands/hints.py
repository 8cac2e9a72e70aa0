"""``lmcache-sidecar hints``: the hints that retain rows in the sidecar at a URL."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from lmcache_sidecar.commands.asking import ExplainError, add_url, ask
from lmcache_store.common.options import describe
from lmcache_store.explain import retained

_ABOUT = """\
Show the hints that retain KV in a sidecar now: how much, for how long, and what they saved so far.
"""
_EXIT = "exit status: 0; 1 if the sidecar does not answer"


def add_arguments(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser("hints", help="show the hints that retain KV")
    describe(parser, _ABOUT, _EXIT, "--url http://127.0.0.1:9464")
    add_url(parser)
    about = "json is for programs (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        page = ask(arguments.url, "/hints")
        if not isinstance(page, dict) or not isinstance(page.get("retained"), list):
            raise ExplainError(f"the server at {arguments.url} is no sidecar")
    except ExplainError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 1
    is_json = arguments.output == "json"
    print(json.dumps(page, indent=2) if is_json else "\n".join(retained.lines([("", page)])))
    return 0
