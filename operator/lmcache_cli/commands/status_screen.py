"""The screens of ``kubectl lmcache status``, from the plain data of the command."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import shorten
from typing import Any

from lmcache_cli.commands import printing
from lmcache_store.causes import HITS, TIERS, num_computed
from lmcache_store.common.text import plain
from lmcache_store.common.units import format_seconds, format_size, seconds_in_words
from lmcache_store.explain.findings import percent
from lmcache_store.explain.tables import LEAST_SECONDS, latency_sentence, usd

_MAX_PODS = 12
"""Pods that are listed without --all-pods. Pods with a problem come first."""
_BAR_COLUMNS, _MAX_PROBLEM = 24, 70
_COLORS = {"Ready": "green", "Serving": "green", "Not": "red"}
"""Colors by the first word of a state; yellow for the others."""


def screen(
    status: Mapping[str, Any], style: printing.Style, width: int, *, all_pods: bool = False, flags: str = ""
) -> Iterator[str]:
    """Yield the lines of the screen. ``flags``: options of commands that reach the same API server."""
    if problem := status["operator"]["problem"]:
        is_absent = status["operator"]["isWorking"] is False
        text = problem if is_absent else f"{problem} If this does not change:"
        for line in printing.wrapped(text, width, ""):
            yield style.paint(line, "red" if is_absent else "yellow")
        yield f"-> kubectl lmcache doctor{flags} {_arguments(status)}"
        yield ""
    title = style.title(f"{status['namespace']}/{status['name']}")
    yield f"{title}  {_painted(status['state'], style)}  {status['time']}"
    yield ""
    yield from _pod_lines(status["pods"], style, _MAX_PODS if not all_pods else len(status["pods"]))
    yield from _tier_lines(status, style)
    if bad := [condition for condition in status["conditions"] if condition["isBad"]]:
        yield style.title("CONDITIONS")
        for condition in bad:
            kind, reason, message = (plain(condition[key]) for key in ("type", "reason", "message"))
            yield from printing.wrapped(f"{kind} is {condition['status']} ({reason}): {message}", width, "  ")
        yield ""
    yield from _next_steps(status, style, width, flags)


def list_lines(
    clusters: Sequence[Mapping[str, Any]], style: printing.Style, flags: str = ""
) -> Iterator[str]:
    """Yield one line for each of several clusters."""
    rows = [("NAMESPACE", "NAME", "STATE", "PODS", "FROM TIERS", "OWN CACHE", "HEARTBEAT")]
    for status in clusters:
        hits, age = status["hitPercent"], status["operator"]["heartbeatSeconds"]
        beat = "none" if age is None else f"{seconds_in_words(age)} ago"
        rows.append(
            (
                status["namespace"],
                status["name"],
                _painted(status["state"], style),
                "-" if status["replicas"] is None else f"{status['readyReplicas']} of {status['replicas']}",
                f"{sum(hits.get(tier, 0) for tier in TIERS)} %" if hits else "-",
                f"{hits.get('engine', 0)} %" if hits else "-",
                style.paint(beat, "red") if status["operator"]["isWorking"] is False else beat,
            )
        )
    yield from style.titled(printing.table(rows, right=(3, 4, 5)))
    yield ""
    yield from filter(None, (status["operator"]["problem"] for status in clusters))
    yield f"More about one of them: kubectl lmcache status{flags} {_arguments(clusters[0])}"


def _arguments(status: Mapping[str, Any]) -> str:
    return f"-n {status['namespace']} {status['name']}"


def _painted(state: str, style: printing.Style) -> str:
    first, *details = state.split(", ")
    painted = style.paint(first, _COLORS.get(first.split()[0], "yellow"))
    return ", ".join([painted, *(style.paint(detail, "yellow") for detail in details)])


def _pod_lines(pods: Sequence[Mapping[str, Any]], style: printing.Style, number: int) -> Iterator[str]:
    if not pods:
        yield "It has no pods."
        yield ""
        return
    ordered = sorted(pods, key=lambda pod: (not pod["problem"], pod["isReady"]))
    rows = [("PODS", "READY", "UP", "MEMORY TIER", "FROM TIERS", "OWN CACHE", "STATE")]
    for pod in ordered[:number]:
        is_known, num_tokens = pod["uptimeSeconds"] > 0, pod["promptTokens"]
        memory = f"{format_size(pod['memoryUsedBytes'])} of {format_size(pod['memoryBytes'])}"
        problem = shorten(pod["problem"], _MAX_PROBLEM, placeholder=" ...")
        rows.append(
            (
                pod["name"],
                style.paint("yes", "green") if pod["isReady"] else style.paint("no", "red"),
                format_seconds(pod["uptimeSeconds"]) if is_known else "-",
                memory if is_known else "-",
                percent(pod["loadedTokens"], num_tokens) if num_tokens else "-",
                percent(pod["engineTokens"], num_tokens) if num_tokens else "-",
                style.paint(problem, "yellow") or _state(pod),
            )
        )
    yield from style.titled(printing.table(rows, right=(2, 4, 5)))
    if len(pods) > number:
        num_bad = sum(bool(pod["problem"]) or not pod["isReady"] for pod in ordered[number:])
        yield f"and {len(pods) - number} more pods, {num_bad} of them with a problem: --all-pods lists all"
    yield ""


def _state(pod: Mapping[str, Any]) -> str:
    return "starting" if pod["isStarting"] else "stopping" if pod["isStopping"] else "in use"


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
    if savings["seconds"] < LEAST_SECONDS:
        return
    latency = savings["firstTokenSavedSeconds"]
    has_table = savings["hasGPUs"] and usd(savings["savedUSD"]) != usd(0)
    if has_table:
        rows = [
            (f"SAVINGS IN {seconds_in_words(savings['seconds']).upper()}", "USD"),
            (f"{savings['gpuHours']:,.2f} hours of GPU time", usd(savings["savedUSD"])),
            ("cost of the tiers", usd(-sum(savings["spentUSD"].values()))),
            ("net", usd(savings["netUSD"])),
        ]
        yield from style.titled(printing.table(rows, right=(1,)))
    if latency:
        yield latency_sentence(latency["p50"], latency["p95"])
    if has_table or latency:
        yield ""


def _next_steps(status: Mapping[str, Any], style: printing.Style, width: int, flags: str) -> Iterator[str]:
    steps, name, pods = list(status["problems"]), _arguments(status), status["pods"]
    steps += [f"{finding['statement']} {finding['advice']}" for finding in status["findings"]]
    number = sum(pod["isStarting"] for pod in pods)
    normal = "NoEngineReady" if number else ""  # the pods that start explain it
    troubles = [each for each in status["conditions"] if each["isTrouble"] and each["reason"] != normal]
    is_bad = bool(troubles) or any(pod["problem"] for pod in pods)
    if is_bad and status["operator"]["isWorking"] is not False:
        steps.append(f"Find the reason of problems: kubectl lmcache doctor{flags} {name}")
    elif number:
        about = "1 pod is starting" if number == 1 else f"{number} pods are starting"
        steps.append(f"{about}. Wait until the state is Ready: kubectl lmcache status{flags} {name} --watch")
    if status["promptTokens"]:
        steps.append(f"See why the other tokens were computed: kubectl lmcache explain{flags} {name}")
    elif any(pod["isReady"] for pod in pods) and not status["problems"]:
        steps.append("No prompt was counted yet: send a request to the engines.")
    if steps:
        yield style.title("WHAT TO DO NEXT")
    for step in steps:
        yield from printing.wrapped(step, width, "- ")
