"""The section of a report about sizes: curves, and what the autoscaler decided. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache.explain.text import plain
from lmcache_operator.autoscaling.show.curve import TIERS, Curve
from lmcache_operator.commands.reports import charts
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.html import Html, element, table
from lmcache_operator.commands.reports.sections import section
from lmcache_operator.errors import InvalidSpecError, NoCurveError
from lmcache_operator.specs.merge import dig

_MODES = {
    "Auto": "The autoscaler resizes tiers by itself.",
    "Recommend": "The autoscaler only recommends sizes. Nothing is resized.",
    "Off": "The autoscaler is off.",
}


def sizing(facts: Facts) -> Html:
    """Show the hits and the value of other sizes, and what the autoscaler decided."""
    mode = dig(facts.cluster, "spec", "autoscaling", "mode")
    content = [element("p", _MODES.get(mode if isinstance(mode, str) else "Recommend", ""))]
    if rows := list(_decisions(facts.autoscaling)):
        titles = ("tier", "present", "recommended", "next", "saves USD/h", "limited by")
        content.append(table(titles, rows, numbers=(1, 2, 3, 4)))
    for tier in TIERS:
        if tier == TIERS[0] or facts.autoscaling.get(tier):
            content += _curve(facts, tier)
    return section("Sizes of the tiers", *content)


def _decisions(autoscaling: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for tier in TIERS:
        status = autoscaling.get(tier)
        if not isinstance(status, Mapping):
            continue
        unit = " shards" if tier == TIERS[1] else ""
        sizes = (
            f"{status[name]}{unit}" if name in status else "-" for name in ("current", "recommended", "next")
        )
        saving = status.get("saving")
        usd = "-"
        if isinstance(saving, Mapping):
            usd = f"{saving.get('usdPerHour')} ({saving.get('low')} to {saving.get('high')})"
        yield (f"{tier} tier", *sizes, usd, plain(status.get("limitedBy")) or "-")


def _curve(facts: Facts, tier: str) -> list[Html]:
    try:
        curve = Curve.of(facts.cluster, tier)
    except (NoCurveError, InvalidSpecError) as error:
        return [
            element("p", f"There is no curve of the {tier} tier. {plain(str(error), 2048)}", class_="note")
        ]
    pictures = (element("figure", charts.picture(panel)) for panel in curve.panels())
    return [
        element("h3", f"What each size of the {tier} tier is worth"),
        element("div", pictures, class_="pictures"),
        element("p", curve.reason),
        element("p", f"({curve.about})", class_="note"),
    ]
