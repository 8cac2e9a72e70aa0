"""The whole page: sections, style and head. It needs no network, and no script. Pure."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from lmcache_operator.commands.reports import sections
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.html import Html, element, joined
from lmcache_operator.commands.reports.saving import saving
from lmcache_operator.commands.reports.sizing import sizing
from lmcache_operator.commands.status import is_bad
from lmcache_operator.specs.merge import dig

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""A browser loads nothing and runs nothing, even if a text were not escaped."""
_STYLE = Path(__file__).with_name("page.css")


def page(facts: Facts) -> str:
    """Return the report as one HTML file."""
    parts = (
        sections.headline(facts),
        sections.missing(facts),
        saving(facts),
        sections.advice(facts),
        sections.sources(facts),
        sections.over_time(facts),
        sections.tiers(facts),
        sizing(facts),
        sections.events(facts),
        sections.conditions(facts),
        sections.pods(facts),
        sections.versions(facts),
    )
    body = element("body", _header(facts), element("main", parts), _footer())
    return f"<!DOCTYPE html>\n{element('html', _head(facts), body, lang='en')}\n"


def _head(facts: Facts) -> Html:
    # The texts of this function are constants, except the title.
    return element(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html('<meta name="color-scheme" content="light dark">'),
        Html('<link rel="icon" href="data:,">'),
        element("title", f"Cache report of {facts.name}"),
        element("style", Html(_STYLE.read_text(encoding="utf-8"))),
    )


def _header(facts: Facts) -> Html:
    conditions = facts.status["conditions"]
    is_ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    badges = [_badge("Ready", "good") if is_ready else _badge("Not ready", "bad")]
    if any(each["type"] == "Degraded" and is_bad(each) for each in conditions):
        badges.append(_badge("Degraded", "bad"))
    time = datetime.fromtimestamp(facts.gathered.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
    model = dig(facts.cluster, "spec", "model", "name")
    number = len(facts.gathered.pods)
    about = [f"model {model}" if model else "", f"{number} pod{'s' if number != 1 else ''}", time]
    return element(
        "header",
        element("h1", facts.name, " ", joined(badges)),
        element("p", " · ".join(filter(None, about))),
    )


def _badge(text: str, class_: str) -> Html:
    return element("span", text, class_=f"badge {class_}")


def _footer() -> Html:
    about = (
        "LMCache Cluster wrote this report with kubectl lmcache report. It contains names, figures and "
        "messages, but no text and no tokens of prompts."
    )
    return element("footer", element("p", about))
