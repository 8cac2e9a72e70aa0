"""``kubectl lmcache explain``: why the prompts of all pods of a cluster were computed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import (
    POD_SECONDS,
    Gathered,
    gather,
    gather_of,
    missing_rights,
    objects_in,
    pods_of,
    problems_of,
    read_each,
    read_page,
)
from lmcache_cli.commands.printing import print_problems
from lmcache_cli.commands.savings import document, has_gpus, price_of_token, saved_by
from lmcache_operator.errors import NotFoundError
from lmcache_operator.kube.pod_http import PodHttp
from lmcache_store.explain import merge, tables, tenants
from lmcache_store.explain.findings import findings

_MAX_REQUESTS = 1000
_ABOUT = """\
Show where the tokens of all prompts came from, why the others were computed, and what to do about it.

With --tenant: the prompts of one tenant. With --request-id: one of the last 1,000 requests of each pod.
Without NAME: all clusters of the namespace, but --tenant needs the name if there are several.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 2 if the cluster cannot be read, or no pod knows the request or the tenant"
    printing.describe(parser, _ABOUT, status, "-n team qwen3-8b", "--request-id cmpl-8b2f")
    connection.add_connection(parser, default="all")
    printing.add_output(parser)
    subject = parser.add_mutually_exclusive_group()
    about = "request id as in the engine's answer, or a part of it"
    subject.add_argument("--request-id", metavar="ID", help=about)
    subject.add_argument("--tenant", metavar="NAME", help=tenants.ABOUT)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def show(connected: connection.ApiConnection) -> int:
        if arguments.request_id is not None:
            return await _explain_request(connected, arguments)
        if arguments.tenant is not None:
            _print_tenant(await gather(connected, arguments.name), arguments)
            return 0
        clusters = await connected.named_or_all(arguments.name)
        gathered = [await gather_of(connected, cluster) for cluster in clusters]
        documents = [explanation(each) for each in gathered]
        print_problems([problem for each in documents for problem in each["problems"]])
        value = {"version": 1, "clusters": documents} if documents[1:] else documents[0]
        print(printing.answer(arguments.output, _lines(gathered), value), end="")
        return 0

    return connection.run(arguments, show)


def _lines(clusters: Sequence[Gathered]) -> Iterator[str]:
    """Yield the overview of each cluster, with its name if there are several."""
    for each in clusters:
        if len(clusters) > 1:
            yield "{namespace}/{name}".format_map(each.cluster["metadata"])
        yield from overview(each)
        yield from [""] * (len(clusters) > 1)


def overview(gathered: Gathered) -> Iterator[str]:
    """Yield the lines about all prompts of a cluster."""
    causes = merge.causes(gathered.stats)
    price = price_of_token(gathered)
    yield from tables.overview(causes, price)
    yield from tables.reasons(gathered.stats)
    yield from tenants.overview(gathered.stats)
    if causes["prompt_tokens"]:
        yield ""
        yield from tables.benefit(saved_by(gathered), has_gpus(gathered))


def explanation(gathered: Gathered) -> dict[str, Any]:
    """Return the causes of a cluster as plain data. Its fields are stable: programs may read them."""
    causes = merge.causes(gathered.stats)
    price = price_of_token(gathered)
    return {
        "version": 1,
        "namespace": gathered.cluster["metadata"]["namespace"],
        "name": gathered.cluster["metadata"]["name"],
        "pods": len(gathered.stats),
        "promptTokens": causes["prompt_tokens"],
        "causeTokens": causes["cause_tokens"],
        "divergedTokens": causes["diverged_tokens"],
        "divergedRequests": causes["diverged_requests"],
        "branches": causes["branches"],
        "privateReasons": merge.reasons(gathered.stats, "private_reason"),
        "uncachedReasons": merge.reasons(gathered.stats, "causes", "uncached_reason"),
        "tenants": [tenants.document(each) for each in tenants.by_name(gathered.stats)],
        "findings": [finding._asdict() for finding in findings(causes, price)],
        "savings": document(saved_by(gathered)),
        "problems": problems_of(gathered.pods, gathered.problems),
    }


def _print_tenant(gathered: Gathered, arguments: argparse.Namespace) -> None:
    """Print the causes and figures of one tenant. Raises NotFoundError for an unknown name."""
    name, known = arguments.tenant, tenants.names(gathered.stats)
    problems = problems_of(gathered.pods, gathered.problems)
    print_problems(problems)
    if not gathered.stats:
        raise NotFoundError("no sidecar answered: check that the pods of the LMCacheCluster run")
    if name not in known:
        raise NotFoundError(tenants.unknown(name, known))
    price = price_of_token(gathered)
    figures, causes = tenants.tenant(gathered.stats, name), tenants.causes(gathered.stats, name)
    advice = findings(causes, price, advice_if_evicted=figures.advice(), whose=tenants.WHOSE)
    content = {
        "version": 1,
        **tenants.document(figures),
        "causeTokens": causes["cause_tokens"],
        "divergedTokens": causes["diverged_tokens"],
        "findings": [finding._asdict() for finding in advice],
        "problems": problems,
    }
    lines = tenants.lines(gathered.stats, name, price)
    print(printing.answer(arguments.output, lines, content), end="")


async def _explain_request(connected: connection.ApiConnection, arguments: argparse.Namespace) -> int:
    await connected.named_or_all(arguments.name)
    pods = await pods_of(connected, arguments.name)
    get = PodHttp(connected.api, seconds=POD_SECONDS).get
    query = urlencode({"id": arguments.request_id}, errors="replace")
    figures = await read_each(pods, lambda pod: read_page(get, pod, f"/requests?{query}"))
    matching = [(each.name, request) for each in figures for request in _requests(each.stats)]
    if not matching:
        print_problems(problems_of(figures, missing_rights(figures, connected.namespace)))
        raise NotFoundError(
            f"no pod knows a request with {arguments.request_id!r} in its id: each remembers its last 1,000"
        )
    pod, newest = max(matching, key=lambda each: merge.count(each[1].get("time")))
    lines = [f"Pod {pod}.", *tables.request(newest)]
    print(printing.answer(arguments.output, lines, {"pod": pod, **newest}), end="")
    return 0


def _requests(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the requests of an answer that can be shown."""
    return [
        {
            **request,
            "common_tokens": int(merge.count(request.get("common_tokens"))),
            "tokens": dict(merge.totals([request], "tokens")),
        }
        for request in objects_in(answer, "requests", _MAX_REQUESTS)
        if isinstance(request.get("request_id"), str)
    ]
