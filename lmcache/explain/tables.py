"""Tables of causes for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

from lmcache.explain.causes import COMPUTED, HITS, num_computed
from lmcache.explain.findings import findings, percent
from lmcache.explain.sizes import LargerMemory

_BAR, _WIDTH = 30, 100  # columns of the largest bar, and of a line of text
_INDENT = "     "


def overview(causes: Mapping[str, Any], larger: LargerMemory | None = None) -> Iterator[str]:
    """Yield the lines that explain all counted prompts. ``larger``: see ``findings``."""
    tokens, total = causes["cause_tokens"], causes["prompt_tokens"]
    if not total:
        yield "No prompt was counted yet: send a request to the engine."
        return
    computed = num_computed(tokens)
    shares = percent(total - computed, total), percent(computed, total)
    yield "{:,} tokens of prompts: {} loaded, {} computed.".format(total, *shares)
    yield ""
    yield from _rows("LOADED FROM", HITS, tokens, total)
    yield from _rows("COMPUTED BECAUSE", COMPUTED, tokens, total)
    found = findings(causes, larger)
    yield "What stands out:" if found else "Nothing stands out."
    for number, finding in enumerate(found, 1):
        yield from wrap(finding.statement, _WIDTH, initial_indent=f"{number:3}. ", subsequent_indent=_INDENT)
        yield from wrap(finding.advice, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)


def request(explained: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines that explain one request."""
    tokens = explained["tokens"]
    total = sum(tokens.values())
    request_id = explained["request_id"].encode("unicode_escape").decode()  # users of the engine choose ids
    yield f"Request {request_id}: {total:,} tokens."
    yield f"An earlier prompt began with the same {explained['common_tokens']:,} tokens."
    yield ""
    yield from _rows("LOADED FROM", HITS, tokens, total)
    yield from _rows("COMPUTED BECAUSE", COMPUTED, tokens, total)


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
