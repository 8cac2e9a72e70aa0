"""Tables of causes for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any

from lmcache_store.causes import COMPUTED, HITS, num_computed
from lmcache_store.common.text import plain
from lmcache_store.common.units import format_seconds, seconds_in_words
from lmcache_store.explain import merge
from lmcache_store.explain.benefit import Benefit
from lmcache_store.explain.findings import findings, percent

_BAR, _WIDTH = 30, 100  # columns of the largest bar, and of a line of text
_INDENT = "     "
_MIN_USD = 0.01
LEAST_SECONDS = 60.0
"""Shortest time whose savings are shown."""


def overview(
    causes: Mapping[str, Any], usd_per_token: float = 0.0, advice_if_evicted: str = "", whose: str = "all"
) -> Iterator[str]:
    """Yield the lines that explain all counted prompts. See ``findings`` for the arguments."""
    tokens, total = causes["cause_tokens"], causes["prompt_tokens"]
    if not total:
        yield "No prompt was counted yet: send a request to the engine."
        return
    computed, engine = num_computed(tokens), tokens.get("engine", 0)
    loaded = f"{percent(total - computed - engine, total)} loaded"
    if engine:
        loaded += f", {percent(engine, total)} in {HITS['engine']}"
    yield f"{total:,} tokens of prompts: {loaded}, {percent(computed, total)} computed."
    yield ""
    yield from _rows("LOADED FROM", HITS, tokens, total)
    yield from _rows("COMPUTED BECAUSE", COMPUTED, tokens, total)
    found = findings(causes, usd_per_token, advice_if_evicted=advice_if_evicted, whose=whose)
    yield "What stands out:" if found else "Nothing stands out."
    for number, finding in enumerate(found, 1):
        statement = finding.statement
        if finding.usd >= _MIN_USD:
            statement += f" That took {finding.usd:,.2f} USD of GPU time."
        yield from wrap(statement, _WIDTH, initial_indent=f"{number:3}. ", subsequent_indent=_INDENT)
        yield from wrap(finding.advice, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def reasons(reports: Sequence[Any]) -> Iterator[str]:
    """Yield a paragraph for each reason that engines give for KV that is not cached, or not shared.

    ``reports``: the /stats of sidecars.
    """
    for reason in merge.reasons(reports, "private_reason"):
        yield ""
        yield from wrap(f"An engine shares no KV, and only the memory of its pod holds it: {reason}.", _WIDTH)
    for reason in merge.reasons(reports, "causes", "uncached_reason"):
        yield ""
        yield from wrap(f"The last request that cannot be cached: {reason}.", _WIDTH)


def request(explained: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that explain one request."""
    tokens = explained["tokens"]
    total = sum(tokens.values())
    request_id = explained["request_id"].encode("unicode_escape").decode()  # users of the engine choose ids
    yield f"Request {request_id}: {total:,} tokens."
    yield f"An earlier prompt began with the same {explained['common_tokens']:,} tokens."
    if tenant := plain(explained.get("tenant")):
        yield f"Its tenant is {tenant}."
    if reason := plain(explained.get("uncached_reason")):
        yield f"It cannot be cached: {reason}."
    yield from _times(explained)
    yield ""
    yield from _rows("LOADED FROM", HITS, tokens, total)
    yield from _rows("COMPUTED BECAUSE", COMPUTED, tokens, total)


def benefit(saved: Benefit, has_gpus: bool = True) -> Iterator[str]:
    """Yield the lines that say what the cache saves, and what it costs.

    ``has_gpus``: False if engines compute on CPUs, so that computing has no price.
    """
    if saved.num_silent:
        total = saved.num_sidecars + saved.num_silent
        yield f"{saved.num_silent} of {total} sidecars count no benefit yet: they are starting."
    if not saved.num_sidecars:
        return
    if has_gpus and saved.uptime_seconds >= LEAST_SECONDS and usd(saved.saved_usd) != usd(0):
        yield from _money(saved)
    waits = format_seconds(saved.wait_seconds), format_seconds(saved.load_seconds)
    yield "In total, requests waited {} for rows or memory, and spent {} on loads.".format(*waits)
    yield from wrap(_saved_latency(saved), _WIDTH)


def _money(saved: Benefit) -> Iterator[str]:
    title = f"IN {seconds_in_words(saved.uptime_seconds).upper()}"
    yield f"{'SAVED AND SPENT':38}  {title:>16}  {'USD':>10}"
    yield f"{'tokens loaded from tiers':38}  {sum(saved.loaded_tokens.values()):16,}"
    yield f"{'prefill time saved':38}  {format_seconds(saved.prefill_seconds):>16}"
    yield f"{'GPU time saved':38}  {f'{saved.gpu_hours:,.2f} h':>16}  {usd(saved.saved_usd):>10}"
    for tier, hours in saved.gib_hours.items():
        if hours:
            title = "shards of the remote tier" if tier == "remote" else HITS[tier]
            yield f"{title:38}  {f'{hours:,.1f} GiB h':>16}  {usd(-saved.spent_usd[tier]):>10}"
    yield f"{'net':38}  {'':16}  {usd(saved.net_usd):>10}"
    if saved.unrated_tokens:
        yield f"{saved.unrated_tokens:,} loaded tokens are not priced: the engine's speed is not known yet."


def usd(amount: float) -> str:
    """Return an amount with its sign; an amount that rounds to nothing has none."""
    text = f"{amount:+,.2f}"
    return text if float(text.replace(",", "")) else "0.00"


def latency_sentence(p50: float, p95: float) -> str:
    """Return the seconds until the first token that a hit saves, as a sentence."""
    parts = [f"{format_seconds(abs(each))} {'earlier' if each >= 0 else 'later'}" for each in (p50, p95)]
    return f"With a hit, the first token arrives {parts[0]} at the median, and {parts[1]} at p95."


def _saved_latency(saved: Benefit) -> str:
    if saved.saved_latency is None:
        return (
            "How much earlier a hit gives the first token is not known, because the sidecars saw no requests "
            "of similar length with and without hits."
        )
    p50, p95, number = saved.saved_latency
    return (
        f"{latency_sentence(p50, p95)} "
        f"{number:,} of {saved.num_hits:,} requests with hits were compared with requests of similar length."
    )


def _times(explained: Mapping[str, Any]) -> Iterator[str]:
    """Yield how long a request took, as far as its engine reported it."""
    if explained.get("lookup_seconds") is None:
        yield "Its engine has not reported how long it took."
        return
    seconds = {name: merge.count(explained.get(f"{name}_seconds")) for name in ("lookup", "wait")}
    parts = [f"{name} {format_seconds(number)}" for name, number in seconds.items()]
    loads = merge.sums([explained], "load_seconds")
    parts += [f"load from {HITS[tier]} {format_seconds(loads[tier])}" for tier in HITS if tier in loads]
    if first := merge.count(explained.get("first_token_seconds")):
        parts.append(f"arrival to first token {format_seconds(first)}")
    yield f"Time: {', '.join(parts)}."


def _rows(title: str, titles: Mapping[str, str], tokens: Mapping[str, int], total: int) -> Iterator[str]:
    present = {titles[cause]: tokens[cause] for cause in titles if tokens.get(cause)}
    if not present:
        return
    width = max(map(len, (title, *COMPUTED.values())))
    yield f"{title:{width}}  {'TOKENS':>13}  {'SHARE':>5}"
    for about, number in present.items():
        bar = "█" * round(_BAR * number / total)
        yield f"{about:{width}}  {number:13,}  {percent(number, total):>5}  {bar}".rstrip()
    yield ""
