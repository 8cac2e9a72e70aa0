"""``lmcache-sidecar explain``: prints why prompts were computed, as the sidecar at a URL counts them."""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import urllib.parse
from collections.abc import Iterator
from typing import Any

from lmcache_sidecar.commands.asking import ExplainError, add_url, ask
from lmcache_store.common.options import describe
from lmcache_store.common.prices import Prices
from lmcache_store.explain import merge, tables, tenants
from lmcache_store.explain.benefit import Benefit, benefit, usd_per_token
from lmcache_store.explain.sizes import LargerMemory, larger_memory

_ABOUT = """\
Show where the tokens of prompts came from, and why the others were computed.

By default: all requests since the sidecar started, with advice. With --tenant: the requests of one tenant.
With --request-id: one of the last 1,000 requests.
"""
_EXIT = """\
exit status: 0; 1 if the sidecar does not answer, or does not know the request or the tenant
"""
_EXAMPLES = "--request-id cmpl-8b2f", "--tenant search"


def add_arguments(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    parser = commands.add_parser("explain", help="show why prompts were computed")
    describe(parser, _ABOUT, _EXIT, *_EXAMPLES)
    add_url(parser)
    subject = parser.add_mutually_exclusive_group()
    subject.add_argument(
        "--request-id", metavar="ID", help="request id as in the engine's answer, or a part of it"
    )
    subject.add_argument("--tenant", metavar="NAME", help=tenants.ABOUT)
    parser.add_argument("--output", choices=("table", "json"), default="table", help="default: %(default)s")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit status."""
    try:
        answer, lines = _explain(arguments)
        text = json.dumps(answer, indent=2) if arguments.output == "json" else "\n".join(lines)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        print(
            f"lmcache-sidecar: error: the server at {arguments.url} is no sidecar: {error}", file=sys.stderr
        )
        return 1
    except ExplainError as error:
        print(f"lmcache-sidecar: error: {error}", file=sys.stderr)
        return 1
    print(text)
    return 0


def _explain(arguments: argparse.Namespace) -> tuple[Any, Iterator[str]]:
    if arguments.request_id is None:
        stats = ask(arguments.url, "/stats")
        if "causes" not in stats:
            reason = stats.get("not_ready_reason") or "it is not ready"
            raise ExplainError(f"the sidecar at {arguments.url} has no causes: {reason}")
        price = usd_per_token([stats], Prices())
        if arguments.tenant is not None:
            return _explain_tenant(stats, arguments.tenant, price)
        larger = _larger_memory(arguments.url, stats)
        sizes = {"larger_memory": larger._asdict()} if larger else {}
        saved = benefit([stats], Prices())
        overview = tables.overview(stats["causes"], price, larger.advice() if larger else "")
        middle = tables.reasons([stats]), tenants.overview([stats])
        lines = itertools.chain(overview, *middle, _benefit_lines(stats, saved))
        figures: dict[str, Any] = {"tenants": [each._asdict() for each in tenants.by_name([stats])]}
        figures["private_reasons"] = merge.reasons([stats], "private_reason")
        return stats["causes"] | sizes | figures | {"benefit": saved._asdict()}, lines
    query = urllib.parse.urlencode({"id": arguments.request_id}, errors="replace")
    requests = ask(arguments.url, f"/requests?{query}")["requests"]
    if not requests:
        raise ExplainError(
            f"none of the last requests has {arguments.request_id!r} in its id: the sidecar remembers 1,000"
        )
    return requests[0], tables.request(requests[0])


def _explain_tenant(stats: Any, name: str, price: float) -> tuple[Any, Iterator[str]]:
    """Return the figures and the lines about one tenant. Raises ExplainError for an unknown name."""
    known = tenants.names([stats])
    if name not in known:
        raise ExplainError(tenants.unknown(name, known))
    figures = tenants.tenant([stats], name)._asdict() | tenants.causes([stats], name)
    return figures, tenants.lines([stats], name, price)


def _benefit_lines(stats: Any, saved: Benefit) -> Iterator[str]:
    """Yield the lines about savings, once prompts were counted."""
    if stats["causes"]["prompt_tokens"]:
        yield ""
        yield from tables.benefit(saved)
        yield f"Price of a GPU hour: {Prices().gpu_hour:.2f} USD. Memory of pods costs nothing here."


def _larger_memory(url: str, stats: Any) -> LargerMemory | None:
    """Return what larger memory tiers would have hit, if chunks were evicted, and samples are enough."""
    if not stats["causes"]["cause_tokens"].get("evicted"):
        return None
    try:
        memory = stats["memory"]
        return larger_memory(ask(url, "/samples"), memory["size_bytes"], memory["capacity_bytes"])
    except (ExplainError, ValueError):  # the causes are useful without it
        return None
