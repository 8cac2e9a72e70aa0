"""``kubectl lmcache status``: one screen about a cluster: pods, tiers, conditions, and what to do next."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, get_args

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import Gathered, PodFigures, gather_of
from lmcache_cli.commands.heartbeat import attendance, sentence
from lmcache_cli.commands.pod_state import failure_of_pod, is_starting
from lmcache_cli.commands.savings import document, has_gpus, lower_sizes, price_of_token, saved_by
from lmcache_cli.commands.status_screen import list_lines, screen
from lmcache_operator.components.router.router import had_prefill_pods
from lmcache_operator.contract.conditions import Expected
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_store.causes import HITS, TIERS
from lmcache_store.common.text import plain
from lmcache_store.explain import merge
from lmcache_store.explain.findings import findings
from lmcache_store.top import seconds

_CLEAR = "\x1b[H\x1b[2J"
_GOOD = {"Degraded": "False", "Progressing": "False"}
"""Status of conditions if all is well; "True" for the others."""
_SIZE_PENDING = "ResizePending"
"""Reason for pods that keep a size until the user replaces them: no change is under way."""
_SLOW = frozenset({"AutoscalingActive"})
"""Conditions that are Unknown for a while in each new cluster."""
_ABOUT = """\
Show one screen about a cluster: its pods, the tiers of its cache, conditions, and what to do next.

Without NAME, several clusters become a list. Figures count from the start of each sidecar.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0; 2 if the cluster cannot be read"
    printing.describe(parser, _ABOUT, status, "-n team qwen3-8b", "--watch")
    connection.add_connection(parser, "all")
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
            text = await _text(arguments, connected)
            is_screen = arguments.watch and sys.stdout.isatty()
            print(f"{_CLEAR}{text}" if is_screen else text, end="", flush=True)
            if not arguments.watch:
                return 0
            await asyncio.sleep(arguments.interval)

    return connection.run(arguments, show)


async def _text(arguments: argparse.Namespace, connected: connection.ApiConnection) -> str:
    style = printing.Style(printing.is_colorful(sys.stdout))
    clusters = await connected.named_or_all(arguments.name)
    if len(clusters) > 1:
        now = datetime.now(UTC).timestamp() + (await connection.api_offset(connected.api) or 0.0)
        summaries = [summary_of(cluster, now) for cluster in clusters]
        listed = {"version": 1, "clusters": summaries}
        return printing.answer(arguments.output, list_lines(summaries, style, connected.flags), listed)
    status = status_of(await gather_of(connected, clusters[0]))
    lines = screen(
        status, style, printing.terminal_width(), all_pods=arguments.all_pods, flags=connected.flags
    )
    return printing.answer(arguments.output, lines, status)


def status_of(gathered: Gathered) -> dict[str, Any]:
    """Return the status as plain data. Its fields are stable: programs may read them."""
    cluster, causes = gathered.cluster, merge.causes(gathered.stats)
    advice = findings(causes, price_of_token(gathered))
    conditions = dig(cluster, "status", "conditions") or []
    saved = document(saved_by(gathered))
    return {
        "version": 1,
        **summary_of(cluster, gathered.time + gathered.api_offset),
        "time": datetime.fromtimestamp(gathered.time, UTC).isoformat(timespec="seconds"),
        "pods": [_pod(pod) for pod in gathered.pods],
        "tiers": list(_tiers(gathered)),
        "promptTokens": causes["prompt_tokens"],
        "causeTokens": causes["cause_tokens"],
        "conditions": [each | {"isBad": is_bad(each), "isTrouble": is_trouble(each)} for each in conditions],
        "savings": saved and saved | {"hasGPUs": has_gpus(gathered)},
        "findings": [finding._asdict() for finding in advice],
        "problems": list(gathered.problems),
    }


def summary_of(cluster: Object, now: float) -> dict[str, Any]:
    """Return what the LMCacheCluster itself says. ``now``: seconds since 1970, at the API server."""
    operator, metadata = attendance(cluster, now), cluster["metadata"]
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "state": state_of(cluster),
        "replicas": _desired(cluster),
        "readyReplicas": dig(cluster, "status", "readyReplicas") or 0,
        "hitPercent": dig(cluster, "status", "hitPercent") or {},
        "operator": {
            "isWorking": operator.is_working,
            "isSpecProcessed": operator.is_applied,
            "heartbeatSeconds": operator.heartbeat_age,
            "problem": sentence(operator, f"{metadata['namespace']}/{metadata['name']}"),
        },
    }


def _desired(cluster: Object) -> int | None:
    """The engines that the spec asks for; None for a remote tier alone."""
    engine = cluster["spec"].get("engine")
    replicas = None if engine is None else engine.get("replicas", 1)
    return None if engine is None else 1 if replicas is None else int(replicas)


def state_of(cluster: Object) -> str:
    """Return the state in a few words, such as ``Serving (1 of 2), Replacing``.

    The count of engines gives way to other parts without which requests fail although engines are ready.
    """
    conditions = {each["type"]: each for each in dig(cluster, "status", "conditions") or ()}
    ready, progressing = conditions.get("Ready"), conditions.get("Progressing", {})
    if ready is None:
        return "No status yet"
    num_ready, desired = dig(cluster, "status", "readyReplicas") or 0, _desired(cluster)
    moving = plain(progressing.get("reason")) if progressing.get("status") == "True" else ""
    is_degraded = conditions.get("Degraded", {}).get("status") == "True"
    count = f" ({num_ready} of {desired})" if desired is not None else ""
    parts = {"RouterAvailable": "router"}
    if had_prefill_pods(cluster):
        parts["PrefillAvailable"] = "prefill pod"
    absent = [noun for kind, noun in parts.items() if conditions.get(kind, {}).get("status") == "False"]
    is_cut_off = bool(absent) and num_ready > 0 and ready["status"] == "False"
    if is_cut_off:
        count = f" (no {' and no '.join(absent)} is ready)"
    if ready["status"] == "Unknown":
        word = "Unknown"
    elif desired == 0 and not num_ready and not moving:
        word = "Scaled to zero"
    elif ready["status"] == "True" and (not moving or moving == "Resizing") and num_ready >= (desired or 0):
        word = "Ready"
    elif num_ready and not is_cut_off:
        word = f"Serving{count}"
    elif moving in ("Starting", "Scaling") and not is_degraded:
        word, moving = f"Starting{count}", ""
    else:
        word = f"Not ready{count}"
    return ", ".join(filter(None, (word, moving, "Degraded" if is_degraded else "")))


def _pod(figures: PodFigures) -> dict[str, Any]:
    stats = figures.stats
    reason = "" if stats.get("is_ready") is True else plain(stats.get("not_ready_reason")) or "not ready"
    attached = merge.count(merge.part(stats, "num_clients").get("attached"))
    tokens = merge.totals([stats], "causes", "cause_tokens")
    problem = figures.problem or reason or ("" if attached else "no engine uses the cache")
    starting = bool(problem) and is_starting(figures.pod)
    stopping = "deletionTimestamp" in figures.pod["metadata"]
    return {
        "name": figures.name,
        "isReady": is_ready(figures.pod),
        "isStarting": starting,
        "isStopping": stopping,
        "problem": "" if starting or stopping else (problem and failure_of_pod(figures.pod)) or problem,
        "uptimeSeconds": merge.count(stats.get("uptime_seconds")),
        "memoryUsedBytes": merge.count(merge.part(stats, "memory").get("used_bytes")),
        "memoryBytes": merge.count(merge.part(stats, "memory").get("size_bytes")),
        "promptTokens": tokens.total(),
        "loadedTokens": _from_tiers(tokens),
        "engineTokens": tokens["engine"],
    }


def _from_tiers(tokens: Counter[str]) -> int:
    """Tokens that the tiers had. Hits in the engine's own cache are not included."""
    return sum(tokens[tier] for tier in TIERS)


def _tiers(gathered: Gathered) -> Iterator[dict[str, Any]]:
    """Yield as plain data the engines' own caches, all tiers of sidecars, and other sources of tokens."""
    tokens = merge.totals(gathered.stats, "causes", "cause_tokens")
    sizes = lower_sizes(gathered) | {"memory": int(merge.total(gathered.stats, "memory", "size_bytes"))}
    if engine_bytes := int(merge.total(gathered.stats, "lookups", "engine_kv_bytes")):
        sizes["engine"] = engine_bytes
    for name in HITS:
        having = [report for report in gathered.stats if name == "engine" or merge.part(report, name)]
        if not (having or tokens[name]):  # no tier has the name of blended tokens
            continue
        used = [int(merge.total([report], name, "used_bytes")) for report in having]
        parts = [merge.part(report, name) for report in having]
        off = [part for part in parts if part.get("is_reachable") is False]
        reason = plain(off[0].get("off_reason")) or "unavailable" if off else ""
        yield {
            "name": name,
            "sizeBytes": sizes.get(name),
            # All sidecars share the remote tier.
            "usedBytes": {"memory": sum(used), "disk": sum(used), "remote": max(used, default=0)}.get(name),
            "hitTokens": tokens[name],
            "problem": f"{len(off)} of {len(having)} pods: {reason}" if off else "",
        }


def is_bad(condition: Mapping[str, Any]) -> bool:
    """Whether a condition says that something is not as it should be."""
    kind, status = condition["type"], condition["status"]
    if kind in _SLOW and status == "Unknown":
        return False
    return bool(status != _GOOD.get(kind, "True")) or condition.get("reason") == _SIZE_PENDING


def is_trouble(condition: Mapping[str, Any]) -> bool:
    """Whether a condition reports a problem, and not a change under way, such as a rollout."""
    return is_bad(condition) and condition.get("reason") not in {*get_args(Expected)} - {_SIZE_PENDING}
