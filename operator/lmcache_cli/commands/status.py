"""``kubectl lmcache status``: one screen about a cluster: pods, tiers, conditions, and what to do next."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import Gathered, PodFigures, gather
from lmcache_cli.commands.savings import document, lower_sizes, price_of_token, saved_by
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs.merge import dig
from lmcache_store.causes import HITS, num_computed
from lmcache_store.common.text import plain
from lmcache_store.common.units import format_seconds, format_size
from lmcache_store.explain import merge
from lmcache_store.explain.findings import findings, percent
from lmcache_store.top import seconds

_MAX_PODS = 12
"""Pods that are listed without --all-pods. Pods with a problem come first."""
_BAR_COLUMNS = 24
_CLEAR = "\x1b[H\x1b[2J"
_GOOD = {"Degraded": "False", "Progressing": "False"}
"""Status of conditions if all is well; "True" for the others."""
_SLOW = frozenset({"AutoscalingActive"})
"""Conditions that are Unknown for a while in each new cluster."""
_ABOUT = """\
Show one screen about a cluster: its pods, the tiers of its cache, conditions, and what to do next.

Figures count from the start of each sidecar.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 2 if the cluster cannot be read"
    printing.describe(parser, _ABOUT, status, "-n team qwen3-8b", "--watch")
    connection.add_connection(parser)
    printing.add_output(parser)
    parser.add_argument("--all-pods", action="store_true", help="list all pods, however many")
    about = "show the screen again and again, until you press Ctrl-C"
    parser.add_argument("-w", "--watch", action="store_true", help=about)
    about = "seconds between two screens of --watch, from 1 to 3600 (default: %(default)g)"
    parser.add_argument("--interval", type=seconds, default=5.0, metavar="SECONDS", help=about)
    parser.set_defaults(command=_run)


def _run(arguments: argparse.Namespace) -> int:
    async def show(connected: connection.ApiConnection) -> int:
        while True:
            text = _text(arguments, await gather(connected, arguments.name))
            is_screen = arguments.watch and sys.stdout.isatty()
            print(f"{_CLEAR}{text}" if is_screen else text, end="", flush=True)
            if not arguments.watch:
                return 0
            await asyncio.sleep(arguments.interval)

    return connection.run(arguments, show)


def _text(arguments: argparse.Namespace, gathered: Gathered) -> str:
    status, style = status_of(gathered), printing.Style(printing.is_colorful(sys.stdout))
    lines = screen(status, style, printing.terminal_width(), all_pods=arguments.all_pods)
    return printing.answer(arguments.output, lines, status)


def status_of(gathered: Gathered) -> dict[str, Any]:
    """Return the status as plain data. Its fields are stable: programs may read them."""
    cluster, causes = gathered.cluster, merge.causes(gathered.stats)
    advice = findings(causes, price_of_token(gathered))
    return {
        "version": 1,
        "namespace": cluster["metadata"]["namespace"],
        "name": cluster["metadata"]["name"],
        "time": datetime.fromtimestamp(gathered.time, UTC).isoformat(timespec="seconds"),
        "pods": [_pod(pod) for pod in gathered.pods],
        "tiers": list(_tiers(gathered)),
        "promptTokens": causes["prompt_tokens"],
        "causeTokens": causes["cause_tokens"],
        "conditions": dig(cluster, "status", "conditions") or [],
        "savings": document(saved_by(gathered)),
        "findings": [finding._asdict() for finding in advice],
        "problems": list(gathered.problems),
    }


def _pod(figures: PodFigures) -> dict[str, Any]:
    stats = figures.stats
    reason = "" if stats.get("is_ready") is True else plain(stats.get("not_ready_reason")) or "not ready"
    attached = merge.count(merge.part(stats, "num_clients").get("attached"))
    tokens = merge.totals([stats], "causes", "cause_tokens")
    return {
        "name": figures.name,
        "isReady": is_ready(figures.pod),
        "problem": figures.problem or reason or ("" if attached else "no engine uses the cache"),
        "uptimeSeconds": merge.count(stats.get("uptime_seconds")),
        "memoryUsedBytes": merge.count(merge.part(stats, "memory").get("used_bytes")),
        "memoryBytes": merge.count(merge.part(stats, "memory").get("size_bytes")),
        "promptTokens": tokens.total(),
        "loadedTokens": tokens.total() - num_computed(tokens),
    }


def _tiers(gathered: Gathered) -> Iterator[dict[str, Any]]:
    """Yield the engines' own caches and all tiers that a sidecar has, each as plain data."""
    tokens = merge.totals(gathered.stats, "causes", "cause_tokens")
    sizes = lower_sizes(gathered) | {"memory": int(merge.total(gathered.stats, "memory", "size_bytes"))}
    if engine_bytes := int(merge.total(gathered.stats, "lookups", "engine_kv_bytes")):
        sizes["engine"] = engine_bytes
    for name in HITS:
        having = [report for report in gathered.stats if name == "engine" or merge.part(report, name)]
        if not having:
            continue
        used = [int(merge.total([report], name, "used_bytes")) for report in having]
        parts = [merge.part(report, name) for report in having]
        off = [part for part in parts if part.get("is_reachable") is False]
        reason = plain(off[0].get("off_reason")) or "unavailable" if off else ""
        yield {
            "name": name,
            "sizeBytes": sizes.get(name),
            # All sidecars share the remote tier.
            "usedBytes": {"memory": sum(used), "disk": sum(used), "remote": max(used)}.get(name),
            "hitTokens": tokens[name],
            "problem": f"{len(off)} of {len(having)} pods: {reason}" if off else "",
        }


def screen(
    status: Mapping[str, Any], style: printing.Style, width: int, *, all_pods: bool = False
) -> Iterator[str]:
    """Yield the lines of the screen."""
    bad = [condition for condition in status["conditions"] if is_bad(condition)]
    ready = next((c["status"] == "True" for c in status["conditions"] if c["type"] == "Ready"), False)
    word = style.paint("Ready", "green") if ready else style.paint("Not ready", "red")
    if any(condition["type"] == "Degraded" for condition in bad):
        word += ", " + style.paint("Degraded", "yellow")
    yield f"{style.title(status['namespace'] + '/' + status['name'])}  {word}  {status['time']}"
    yield ""
    yield from _pod_lines(status["pods"], style, _MAX_PODS if not all_pods else len(status["pods"]))
    yield from _tier_lines(status, style)
    if bad:
        yield style.title("CONDITIONS")
        for condition in bad:
            text = f"{condition['type']} is {condition['status']} ({condition['reason']}): "
            yield from printing.wrapped(text + plain(condition["message"]), width, "  ")
        yield ""
    yield from _next_steps(status, style, width)


def is_bad(condition: Mapping[str, Any]) -> bool:
    """Whether a condition says that something is not as it should be."""
    kind, status = condition["type"], condition["status"]
    if kind in _SLOW and status == "Unknown":
        return False
    return bool(status != _GOOD.get(kind, "True"))


def _pod_lines(pods: Sequence[Mapping[str, Any]], style: printing.Style, number: int) -> Iterator[str]:
    if not pods:
        yield "It has no pods."
        yield ""
        return
    ordered = sorted(pods, key=lambda pod: not pod["problem"] and pod["isReady"])
    rows = [("PODS", "READY", "UP", "MEMORY TIER", "LOADED", "CACHE")]
    for pod in ordered[:number]:
        is_known = pod["uptimeSeconds"] > 0
        memory = f"{format_size(pod['memoryUsedBytes'])} of {format_size(pod['memoryBytes'])}"
        rows.append(
            (
                pod["name"],
                style.paint("yes", "green") if pod["isReady"] else style.paint("no", "red"),
                format_seconds(pod["uptimeSeconds"]) if is_known else "-",
                memory if is_known else "-",
                percent(pod["loadedTokens"], pod["promptTokens"]) if pod["promptTokens"] else "-",
                style.paint(pod["problem"][:70], "yellow") if pod["problem"] else "in use",
            )
        )
    yield from style.titled(printing.table(rows, right=(2, 4)))
    if len(pods) > number:
        num_bad = sum(bool(pod["problem"]) or not pod["isReady"] for pod in ordered[number:])
        yield f"and {len(pods) - number} more pods, {num_bad} of them with a problem: --all-pods lists all"
    yield ""


def _tier_lines(status: Mapping[str, Any], style: printing.Style) -> Iterator[str]:
    if not status["tiers"]:
        return
    prompt_tokens = status["promptTokens"]
    rows = [("TOKENS FROM", "USED", "SIZE", "SHARE", "", "HEALTH")]
    for tier in status["tiers"]:
        used, size = tier["usedBytes"], tier["sizeBytes"]
        rows.append(
            (
                HITS[tier["name"]],
                "-" if used is None else format_size(used),
                format_size(size) if size else "-",
                percent(tier["hitTokens"], prompt_tokens) if prompt_tokens else "-",
                printing.bar(tier["hitTokens"] / (prompt_tokens or 1), _BAR_COLUMNS),
                style.paint(tier["problem"], "red") if tier["problem"] else "ok",
            )
        )
    computed = num_computed(status["causeTokens"])
    share = percent(computed, prompt_tokens) if prompt_tokens else "-"
    rows.append(("computed", "", "", share, printing.bar(computed / (prompt_tokens or 1), _BAR_COLUMNS), ""))
    yield from style.titled(printing.table(rows, right=(1, 2, 3)))
    yield f"{prompt_tokens:,} tokens of prompts since the sidecars started."
    yield ""
    if status["savings"]:
        yield from _saving_lines(status["savings"], style)


def _saving_lines(savings: Mapping[str, Any], style: printing.Style) -> Iterator[str]:
    """Yield what the cache saved, what its tiers cost, and what a hit saves."""
    spent = sum(savings["spentUSD"].values())
    rows = [
        ("SAVINGS", f"IN {format_seconds(savings['seconds'])}", "USD"),
        ("GPU time saved", f"{savings['gpuHours']:,.2f} h", f"{savings['savedUSD']:+,.2f}"),
        ("tiers", "", f"{-spent:+,.2f}" if spent else "0.00"),
        ("net", "", f"{savings['netUSD']:+,.2f}"),
    ]
    yield from style.titled(printing.table(rows, right=(1, 2)))
    if latency := savings["firstTokenSavedSeconds"]:
        p50, p95 = format_seconds(latency["p50"]), format_seconds(latency["p95"])
        yield f"A hit saves {p50} to the first token at the median, and {p95} at p95."
    yield ""


def _next_steps(status: Mapping[str, Any], style: printing.Style, width: int) -> Iterator[str]:
    steps = list(status["problems"])
    steps += [f"{finding['statement']} {finding['advice']}" for finding in status["findings"]]
    name = f"-n {status['namespace']} {status['name']}"
    if not status["conditions"]:
        about = "The operator has not reported on this cluster. Find the reason"
        steps.append(f"{about}: kubectl lmcache doctor {name}")
    elif any(pod["problem"] for pod in status["pods"]) or any(map(is_bad, status["conditions"])):
        steps.append(f"Find the reason of problems: kubectl lmcache doctor {name}")
    if status["promptTokens"]:
        steps.append(f"See why the other tokens were computed: kubectl lmcache explain {name}")
    elif status["pods"] and not status["problems"]:
        steps.append("No prompt was counted yet: send a request to the engines.")
    if steps:
        yield style.title("WHAT TO DO NEXT")
    for step in steps:
        yield from printing.wrapped(step, width, "- ")
