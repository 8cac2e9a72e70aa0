"""The sections of a report about prompts, pods and conditions. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmcache.common.units import format_size
from lmcache.explain.causes import COMPUTED, HITS, num_computed
from lmcache.explain.findings import percent
from lmcache.explain.text import plain
from lmcache_operator.commands import printing
from lmcache_operator.commands.reports import charts
from lmcache_operator.commands.reports.facts import Facts
from lmcache_operator.commands.reports.html import Content, Html, element, joined, marked, table
from lmcache_operator.commands.status import is_bad

_MAX_OPEN_PODS = 20
"""Pods up to which their table is open when the page opens."""


def section(title: str, *content: Content) -> Html:
    """Return one section of the page."""
    return element("section", element("h2", title), *content)


def headline(facts: Facts) -> Html:
    """Say in words, and in three large figures, what the cache saves."""
    tokens, total = facts.status["causeTokens"], facts.status["promptTokens"]
    if not total:
        about = "No engine has reported a prompt since the sidecars started. Send a request to an engine."
        return section("The cache has not served a prompt yet", element("p", about, class_="lead"))
    computed = num_computed(tokens)
    engine = tokens.get("engine", 0)
    tiers = total - computed - engine
    title = f"The cache served {percent(total - computed, total)} of all prompt tokens"
    about = (
        f"Engines computed {computed:,} of {total:,} prompt tokens. {percent(tiers, total)} of the tokens "
        f"came from the tiers of the cache, and {percent(engine, total)} from the engines' own caches."
    )
    cards = {
        "of prompt tokens were not computed": percent(total - computed, total),
        "of prompt tokens came from the tiers": percent(tiers, total),
        "tokens did not need a GPU": _short(total - computed),
    }
    return section(
        title,
        element("p", about, class_="lead"),
        element("div", (_card(value, what) for what, value in cards.items()), class_="cards"),
        element("p", _age(facts), class_="note"),
    )


def _card(value: str, about: str) -> Html:
    return element("div", element("strong", value), element("span", about), class_="card")


def _short(number: float) -> str:
    """Return a number of at most five characters, such as "12.3M"."""
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= factor:
            return f"{number / factor:.{1 if number < 100 * factor else 0}f}{unit}"
    return f"{number:.0f}"


def _age(facts: Facts) -> str:
    ages = [pod["uptimeSeconds"] for pod in facts.status["pods"] if pod["uptimeSeconds"]]
    if not ages:
        return "No sidecar answered."
    longest, shortest = printing.duration(max(ages)), printing.duration(min(ages))
    newest = f", and the newest {shortest} ago" if longest != shortest else ""
    sidecars = f"{len(ages)} sidecars" if len(ages) > 1 else "1 sidecar"
    return f"Figures of {sidecars}. Each counts from its start: the oldest started {longest} ago{newest}."


def missing(facts: Facts) -> Html:
    """Say what could not be read; empty if everything was."""
    silent = [f"{pod['name']}: {pod['problem']}" for pod in facts.status["pods"] if not pod["uptimeSeconds"]]
    problems = [*facts.gathered.problems, *facts.problems]
    if silent:
        first = "; ".join(silent[:3])
        problems.append(
            f"{len(silent)} of {len(facts.gathered.pods)} sidecars did not answer. First: {first}."
        )
    if not problems:
        return Html()
    lines = (element("li", marked(problem)) for problem in problems)
    return element("section", element("h2", "What this report lacks"), element("ul", lines), class_="warning")


def advice(facts: Facts) -> Html:
    """List what stands out, with what to do."""
    findings = facts.status["findings"]
    if not findings:
        return section("What to do", element("p", "Nothing stands out in the causes of computed tokens."))
    items = (
        element("li", element("strong", finding["statement"]), " ", marked(finding["advice"]))
        for finding in findings
    )
    return section("What to do", element("ol", items))


def sources(facts: Facts) -> Html:
    """Show where prompt tokens came from, and why the others were computed."""
    tokens, total = facts.status["causeTokens"], facts.status["promptTokens"]
    if not total:
        return Html()
    computed = num_computed(tokens)
    unused = {tier["name"] for tier in facts.status["tiers"]}
    loaded = {
        title: tokens.get(name, 0) for name, title in HITS.items() if tokens.get(name) or name in unused
    }
    colours = [number for number, name in enumerate(HITS) if tokens.get(name) or name in unused]
    loaded["computed"] = computed
    by_cause = {title: tokens[cause] for cause, title in COMPUTED.items() if tokens.get(cause)}
    causes = dict(sorted(by_cause.items(), key=lambda pair: -pair[1]))
    return joined(
        section("Where prompt tokens came from", _bars(loaded, total, [*colours, 7])),
        section(
            "Why the others were computed",
            _bars(causes, computed, [7] * len(causes)) if computed else element("p", "None was computed."),
        ),
    )


def _bars(numbers: Mapping[str, int], total: int, colours: list[int]) -> Html:
    rows = (
        element(
            "tr",
            element("th", about, scope="row"),
            element("td", f"{number:,}", class_="number"),
            element("td", percent(number, total), class_="number"),
            element("td", _bar(number / total, colour), class_="bar"),
        )
        for (about, number), colour in zip(numbers.items(), colours, strict=True)
    )
    titles = element("tr", element("th", ""), element("th", "tokens", class_="number"),
        element("th", "share", class_="number"), element("th", ""))  # fmt: skip
    return element("table", element("thead", titles), element("tbody", rows), class_="bars")


def _bar(share: float, colour: int) -> Html:
    return element("div", "", class_=f"series{colour}", style=f"width:{100 * min(1.0, share):.1f}%")


def over_time(facts: Facts) -> Html:
    """Show the past from Prometheus, or say how to get it."""
    title = f"The last {facts.since}" if facts.history else "Over time"
    if facts.history is None:
        about = "This report has no pictures over time. Add --prometheus URL to the command to include them."
        return section(title, element("p", about, class_="note"))
    if facts.history.problem:
        return section(title, element("p", facts.history.problem, class_="problem"))
    pictures = charts.pictures(facts.history)
    figures = (element("figure", picture) for picture in pictures)
    none = element("p", "Prometheus recorded no prompt and no tier in this time.")
    about = element("p", "From Prometheus. Times are UTC. Gaps are times without data.", class_="note")
    return section(title, element("div", figures, class_="pictures") if pictures else none, about)


def tiers(facts: Facts) -> Html:
    """Show fill and health of each tier."""
    rows = [
        (
            HITS[tier["name"]],
            "-" if tier["usedBytes"] is None else format_size(tier["usedBytes"]),
            format_size(tier["sizeBytes"]) if tier["sizeBytes"] else "-",
            tier["problem"] or "ok",
        )
        for tier in facts.status["tiers"]
    ]
    if not rows:
        return Html()
    return section("Tiers now", table(("tier", "in use", "size", "health"), rows, numbers=(1, 2)))


def conditions(facts: Facts) -> Html:
    """Show the conditions of the cluster, those that need attention first."""
    listed = sorted(facts.status["conditions"], key=lambda condition: not is_bad(condition))
    rows = [
        (
            plain(condition["type"]),
            element("span", condition["status"], class_="bad" if is_bad(condition) else "good"),
            plain(condition.get("reason")),
            plain(condition.get("message"), 2048),
        )
        for condition in listed
    ]
    none = element("p", "The operator has not reported conditions yet.")
    return section("Conditions", table(("condition", "status", "reason", "message"), rows) if rows else none)


def events(facts: Facts) -> Html:
    """Show the newest Events of the cluster, which include the autoscaler's decisions."""
    rows = [
        (time[:16].replace("T", " "), reason, f"{message} ({count} times)" if count > 1 else message)
        for time, reason, message, count in facts.newest_events
    ]
    none = element("p", "There are no Events. Kubernetes deletes them after an hour by default.")
    return section("Events", table(("time (UTC)", "reason", "message"), rows) if rows else none)


def pods(facts: Facts) -> Html:
    """Show one line for each pod."""
    rows = list(_pod_rows(facts))
    if not rows:
        return section("Pods", element("p", "The cluster has no pods."))
    titles = ("pod", "ready", "up", "memory tier", "prompt tokens", "loaded", "cache")
    listed = table(titles, rows, numbers=(2, 3, 4, 5))
    if len(rows) > _MAX_OPEN_PODS:
        listed = element("details", element("summary", f"Show all {len(rows)} pods"), listed)
    return section("Pods", listed)


def _pod_rows(facts: Facts) -> Iterator[tuple[str, ...]]:
    for pod in facts.status["pods"]:
        is_known = pod["uptimeSeconds"] > 0
        memory = f"{format_size(pod['memoryUsedBytes'])} of {format_size(pod['memoryBytes'])}"
        yield (
            pod["name"],
            element("span", "yes", class_="good") if pod["isReady"] else element("span", "no", class_="bad"),
            printing.duration(pod["uptimeSeconds"]) if is_known else "-",
            memory if is_known else "-",
            f"{pod['promptTokens']:,}" if is_known else "-",
            percent(pod["loadedTokens"], pod["promptTokens"]) if pod["promptTokens"] else "-",
            pod["problem"] or "in use",
        )


def versions(facts: Facts) -> Html:
    """Show the version of each part."""
    return section("Versions", table(("part", "version"), facts.versions()))
