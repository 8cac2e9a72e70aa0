"""``lmcache-sidecar top``: the present work of the sidecar at a URL."""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any

from lmcache_sidecar.commands.asking import ExplainError, add_url, ask
from lmcache_store import top
from lmcache_store.common.options import describe
from lmcache_store.explain.traffic import SidecarAnswer

_ABOUT = """\
Show what a sidecar does at present: requests, prompt tokens by where they came from, and traffic by tier.
"""
_EXIT = "exit status: 0; 1 if the sidecar does not answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    describe(parser, _ABOUT, _EXIT, "--url http://127.0.0.1:9464")
    add_url(parser)
    top.add_arguments(parser)
    about = "json is for programs (default: %(default)s)"
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table", help=about)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""

    async def read() -> top.TopReading:
        name = arguments.url.rstrip("/").rpartition("//")[2]
        try:
            report = ask(arguments.url, "/stats")
        except ExplainError as error:
            return top.TopReading([SidecarAnswer(name, name, "", problem=str(error))])
        if not isinstance(report, dict):
            return top.TopReading([SidecarAnswer(name, name, "", problem="the server is no sidecar")])
        return top.TopReading([SidecarAnswer(name, name, "", report)])

    def dump(figures: dict[str, Any]) -> str:
        return json.dumps(figures, indent=2, ensure_ascii=False) + "\n"

    try:
        return asyncio.run(top.run(read, arguments, dump))
    except KeyboardInterrupt:
        return 130
