"""Results of benchmarks as JSON and as tables. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from lmcache.bench.runner import Phase, Run
from lmcache.explain.causes import HITS

_VERSION = 1


def document(run: Run) -> dict[str, Any]:
    """Return results as plain data. Its fields are stable: programs may read them."""
    shape = run.settings.shape
    return {
        "version": _VERSION,
        "kind": "lmcache-bench",
        "started": datetime.fromtimestamp(run.started, timezone.utc).isoformat(timespec="seconds"),
        "model": run.model,
        "engines": run.num_engines,
        "problem": run.problem,
        "settings": {
            "requests": shape.num_requests, "promptTokens": shape.prompt_tokens,
            "outputTokens": shape.output_tokens, "concurrency": run.settings.concurrency,
        },
        "phases": [_phase(phase) for phase in run.phases],
    }  # fmt: skip


def _phase(phase: Phase) -> dict[str, Any]:
    times = sorted(answer.ttft_seconds for answer in phase.answers)
    output = sum(answer.output_tokens for answer in phase.answers)
    prompt = sum(answer.prompt_tokens for answer in phase.answers)
    per_second = 1 / phase.seconds if phase.seconds else 0.0
    return {
        "workload": phase.workload,
        "phase": phase.name,
        "requests": len(phase.answers),
        "seconds": round(phase.seconds, 3),
        "promptTokens": prompt,
        "outputTokens": output,
        "promptTokensPerSecond": round(prompt * per_second, 1),
        "outputTokensPerSecond": round(output * per_second, 1),
        "ttftSeconds": {"p50": percentile(times, 50), "p95": percentile(times, 95)},
        "ttfts": [round(seconds, 5) for seconds in times],
        "causeTokens": phase.cause_tokens,
    }


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Return the smallest value that at least ``percent`` of all values do not exceed; None: no values."""
    number = math.ceil(len(ordered) * percent / 100)
    return round(ordered[max(0, number - 1)], 5) if ordered else None


def read(text: Any) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    """Return the phases of a result file by workload and name. Raises ValueError for other files."""
    try:
        if text["kind"] != "lmcache-bench" or text["version"] != _VERSION:
            raise ValueError("the results are from another version of this program")
        return {(phase["workload"], phase["phase"]): phase for phase in text["phases"]}
    except (KeyError, TypeError) as error:
        raise ValueError("the file has no results of a benchmark") from error


_COLUMNS = ("TTFT P50", "TTFT P95", "PROMPT TOK/S", "OUTPUT TOK/S", "HITS")
_ROW = "{:<16} {:>8}" + " {:>14}" * len(_COLUMNS)


def table(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show one run."""
    number = results["engines"]
    engines = f"{number} engine{'s' if number != 1 else ''}"
    yield f"{results['model']} on {engines}, started {results['started']}"
    yield _ROW.format("WORKLOAD", "REQUESTS", *_COLUMNS)
    for (workload, name), phase in read(results).items():
        values = (_shown(column, value) for column, value in zip(_COLUMNS, _figures(phase), strict=True))
        yield _ROW.format(f"{workload} {name}", phase["requests"], *values)
        if hits := _hits(phase):
            yield f"{'':16} {hits}"
    if results["problem"]:
        yield f"The results are not complete: {results['problem']}."


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that show the differences between two runs."""
    earlier, later = read(before), read(after)
    common = [key for key in earlier if key in later]
    if not common:
        raise ValueError("the two runs have no workload in common")
    for name in ("model", "engines", "settings"):
        if before.get(name) != after.get(name):
            yield f"Note: {name} differs: {before.get(name)} and {after.get(name)}."
    for key in common:
        yield f"{' '.join(key)}:"
        for column, old, new in zip(_COLUMNS, _figures(earlier[key]), _figures(later[key]), strict=True):
            change = _change(column, old, new)
            yield f"  {column:<13} {_shown(column, old):>10} -> {_shown(column, new):>10}  {change}".rstrip()


def _change(column: str, old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    if column == "HITS":
        return f"{100 * (new - old):+.0f} points"
    return f"{100 * (new / old - 1):+.0f} %" if old else ""


def _figures(phase: Mapping[str, Any]) -> tuple[float | None, ...]:
    tokens = phase["causeTokens"]
    total = sum(tokens.values()) if tokens else 0
    hits = sum(tokens.get(name, 0) for name in HITS) / total if total else None
    ttft = phase["ttftSeconds"]
    return ttft["p50"], ttft["p95"], phase["promptTokensPerSecond"], phase["outputTokensPerSecond"], hits


def _shown(column: str, value: float | None) -> str:
    if value is None:
        return "-"
    if column.startswith("TTFT"):
        return f"{1000 * value:,.0f} ms"
    return f"{100 * value:.0f} %" if column == "HITS" else f"{value:,.0f}"


def _hits(phase: Mapping[str, Any]) -> str:
    """Return the share of each tier, and of computed tokens, as words."""
    tokens = phase["causeTokens"] or {}
    total = sum(tokens.values())
    parts = {name: tokens[name] for name in HITS if tokens.get(name)}
    parts["computed"] = total - sum(parts.values())
    return (
        ", ".join(f"{name} {100 * number / total:.0f} %" for name, number in parts.items()) if total else ""
    )
