"""The section of a report about what the cache saves and what it costs. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache.explain.benefit import Benefit
from lmcache.explain.causes import HITS
from lmcache.explain.tables import duration
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.html import Html, element, table
from lmcache_operator.commands.reports.sections import section
from lmcache_operator.commands.savings import saved_by
from lmcache_operator.commands.status import shard_bytes


def saving(facts: Facts) -> Html:
    """Show GPU time and money that the cache saved, what its tiers cost, and the time that a hit saves."""
    saved = saved_by(facts.gathered, shard_bytes(facts.status["tiers"]))
    if not saved.num_sidecars:
        return section("Savings and costs", element("p", "No sidecar counts what the cache saves yet."))
    sign = "more" if saved.net_usd >= 0 else "less"
    hours = saved.uptime_seconds / 3600
    lead = (
        f"The cache saved {abs(saved.net_usd):,.2f} USD {sign} than its tiers cost in {hours:,.1f} hours. "
        f"{_saved_latency(saved)}"
    )
    notes = ["Saved GPU time is money only if you use it. Prices are those of spec.autoscaling.prices."]
    if saved.unrated_tokens:
        notes.append(
            f"{saved.unrated_tokens:,} loaded tokens have no price: their engine's speed is not known."
        )
    if saved.num_silent:
        notes.append(f"{saved.num_silent} sidecars do not count savings: they are old, or are starting.")
    rows = table(("", "amount", "USD"), _rows(saved), numbers=(1, 2))
    return section(
        "Savings and costs", element("p", lead), rows, element("p", " ".join(notes), class_="note")
    )


def _rows(saved: Benefit) -> Iterator[tuple[str, str, str]]:
    yield "tokens loaded from tiers", f"{sum(saved.loaded_tokens.values()):,}", ""
    yield "prefill time saved", duration(saved.prefill_seconds), ""
    yield "GPU time saved", f"{saved.gpu_hours:,.2f} h", f"{saved.saved_usd:+,.2f}"
    for tier, hours in saved.gib_hours.items():
        if hours:
            title = "shards of the remote tier" if tier == "remote" else HITS[tier]
            yield title, f"{hours:,.1f} GiB h", f"{0.0 - saved.spent_usd[tier]:+,.2f}"
    yield "net", "", f"{saved.net_usd:+,.2f}"


def _saved_latency(saved: Benefit) -> str:
    if saved.saved_latency is None:
        return "The time that a hit saves is not known: no like requests without a hit were seen."
    p50, p95, number = saved.saved_latency
    return (
        f"A hit saves {duration(p50)} to the first token (median), and {duration(p95)} at p95. "
        f"For this, {number:,} requests with hits were compared with like requests without a hit."
    )
