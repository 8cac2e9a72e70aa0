"""Advice that follows from the causes, the most important first. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from lmcache_store.causes import num_computed

_MIN_SHARE = 0.05
"""Share of all prompt tokens below which a cause is not mentioned."""
_EARLY_TOKENS = 1024
"""Depth up to which a divergence is probably not a question about a common document."""


_EARLY = (
    "Something at the front of your prompts changes with every request, such as a date or a name. "
    "Move it to the end."
)
_LATE = "These prompts share a document or a system prompt, and then differ. Nothing is wrong."


class Finding(NamedTuple):
    """One statement about the cache, with what to do."""

    share: float
    """Share of all prompt tokens that it is about."""
    statement: str
    advice: str
    usd: float = 0.0
    """Price of the GPU time that computed these tokens, in USD; 0: not known."""


EVICTED = "evicted"

_BY_CAUSE = {
    EVICTED: (
        "were stored before, were evicted, and were computed again",
        "The tiers are too small for your prompts. Compare larger sizes with `kubectl lmcache curve`.",
    ),
    "being_stored": (
        "were computed while an earlier request was still storing them, or another node lacked them",
        "If equal prompts arrive at the same time, send one of them first. "
        "Otherwise, find the node that lacks rows: docs/reference/vllm.md, Ranks over several nodes.",
    ),
    "store_refused": (
        "were not stored, because memory was full of rows that were in use or guaranteed to other tenants",
        "Give the memory tier more bytes.",
    ),
    "not_stored": (
        "were looked up before, but no engine stored them",
        "Read the engine's log: lines of LMCache Cluster say why the engine does not store.",
    ),
    "too_late": (
        "were in a lower tier, which did not deliver them in time",
        "Check the latency of Redis and the load of the disk.",
    ),
    "slower_than_computing": (
        "were in a lower tier, but computing them was faster than loading",
        "Use a faster network or disk, or remove the tier.",
    ),
    "tier_unavailable": (
        "were computed because a lower tier was unavailable",
        "Read the tier's reason in the conditions of the cluster, or in /stats of the sidecar.",
    ),
    "invalid": ("were computed because the stored copy was damaged", "Check the disk and the Redis servers."),
    "load_failed": (
        "were hits, but their load failed, so the engine computed them",
        "Read the engine's log. If rows were evicted during their load, the memory tier is too small.",
    ),
    "recomputed": (
        "belong to documents at another position, and were chosen to be recomputed",
        "This keeps blended answers close to exact ones. With a smaller "
        "spec.engine.blend.ratioPercent, the engine recomputes fewer tokens, and answers differ more.",
    ),
    "private": (
        "were evicted from memory, and lower tiers cannot hold them, because the engine's keys are private",
        "`private_reason` in /stats of the sidecar says why. "
        "Remedies: docs/reference/cached-kv.md, When KV is private.",
    ),
    "not_cacheable": (
        "belong to requests that cannot be cached",
        "Such requests ask for prompt logprobs, or use media or adapters without a hash. "
        "For an adapter, `explain` names it.",
    ),
    "tail": (
        "are less than a chunk at the end of a prompt",
        "Most prompts are short. A smaller chunk size covers more of their tokens.",
    ),
}
"""Statement and advice by cause."""


def findings(
    causes: Mapping[str, Any], usd_per_token: float = 0.0, *, advice_if_evicted: str = "", whose: str = "all"
) -> Sequence[Finding]:
    """Return what stands out in the ``causes`` that one sidecar counts, or several together.

    The most expensive finding is the first. Each token has the same price.

    Args:
        causes: the part ``causes`` of ``/stats``.
        usd_per_token: price of computing a token, see ``benefit.usd_per_token``.
        advice_if_evicted: what to do about evicted tokens; empty: the general advice.
        whose: the word before "prompt tokens" in a statement.
    """
    tokens: Mapping[str, int] = causes["cause_tokens"]
    total = causes["prompt_tokens"]
    found = [
        Finding(
            number / total,
            f"{percent(number, total)} of {whose} prompt tokens {statement}.",
            advice_if_evicted if advice_if_evicted and cause == EVICTED else advice,
            number * usd_per_token,
        )
        for cause, (statement, advice) in _BY_CAUSE.items()
        if (number := tokens.get(cause, 0)) > _MIN_SHARE * total
    ]
    found += _divergence(causes["diverged_tokens"], total, num_computed(tokens), usd_per_token)
    return sorted(found, key=lambda finding: -finding.share)


def _divergence(
    by_depth: Mapping[str, int], total: int, computed: int, usd_per_token: float
) -> Sequence[Finding]:
    """Return where most prompts leave earlier ones, if many tokens follow such a point."""
    depths = sorted(int(depth) for depth in by_depth if depth.isdigit())
    below = list(accumulate(by_depth[str(depth)] for depth in depths))
    half = below[-1] / 2 if below else 0
    depth, number = next((pair for pair in zip(depths, below, strict=True) if pair[1] >= half), (0, 0))
    if number <= _MIN_SHARE * total:
        return []
    place = f"within the first {depth:,} tokens"
    statement = f"{percent(number, computed)} of computed tokens follow a divergence {place}."
    advice = _EARLY if depth <= _EARLY_TOKENS else _LATE
    return [Finding(number / total, statement, advice, number * usd_per_token)]


def percent(number: float, total: float) -> str:
    """Return a share for people, such as "71 %"."""
    return f"{100 * number / total if total else 0:.0f} %"
