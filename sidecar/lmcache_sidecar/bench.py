"""``lmcache-sidecar bench``: measures what the cache saves, at the engine and the sidecar of two URLs."""

from __future__ import annotations

import argparse
import sys

from lmcache.bench import command
from lmcache.bench.client import BenchError, Target
from lmcache.common.options import describe

_EXIT = """\
exit status: 0; 1 if the benchmark did not run, or is not complete

example: lmcache-sidecar bench --url http://localhost:8000 --workload chat -o run.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's texts and options to its parser."""
    describe(parser, command.ABOUT, _EXIT)
    about = "address of the engine (default: %(default)s)"
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help=about)
    about = 'address of its sidecar\'s HTTP server; "" for an engine without one (default: %(default)s)'
    parser.add_argument("--sidecar-url", default="http://127.0.0.1:9464", metavar="URL", help=about)
    command.add_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        if arguments.compare:
            return command.compare(arguments.compare)
        runner = command.runner_for(arguments, [Target(arguments.url, arguments.url, arguments.sidecar_url)])
        try:
            runner.measure()
        except KeyboardInterrupt:
            runner.stop()
        return command.report(arguments, runner)
    except BenchError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 1
