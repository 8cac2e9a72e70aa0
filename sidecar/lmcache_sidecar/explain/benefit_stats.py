"""Counters of what the cache saves and takes, as ``/stats`` has it for ``lmcache_store.explain.benefit``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lmcache_sidecar.explain.requests import BLENDED, LOAD_FAILED, RECOMPUTED, ExplainedRequest
from lmcache_store.causes import TIERS
from lmcache_store.explain.benefit import FirstTokenCounts, latency_bucket, length_bucket
from lmcache_store.tiers.stats import counter, counters


@dataclass
class BenefitStats:
    """Counters of saved time, and of the memory that it takes."""

    saved_prefill_seconds: dict[str, float] = counters(
        "tier", "Seconds that engines would need to compute the tokens that they loaded, at their speed"
    )
    saved_gpu_seconds: float = counter("The same seconds, multiplied by the GPUs of the engine")
    tier_byte_seconds: dict[str, float] = counters(
        "tier", "Bytes of the memory tier, and bytes in use on disk, multiplied by the seconds they were held"
    )
    first_tokens: FirstTokenCounts = field(default_factory=dict)
    """Numbers of requests by length of the prompt, source of the first tokens, and seconds to the first."""
    unrated_tokens: Counter[str] = field(default_factory=Counter)
    """Loaded tokens of engines whose speed is not known yet, by tier."""
    _held: Mapping[str, int] = field(default_factory=dict)
    _held_at: float = 0.0

    def count(self, request: ExplainedRequest) -> None:
        """Count the tokens that a request loaded. Tokens of unknown speed count when a speed is known."""
        self.unrated_tokens.update({tier: request.tokens[tier] for tier in TIERS if tier in request.tokens})
        rate = request.engine.tokens_per_second
        if not rate:
            return
        saved = {tier: num_tokens / rate for tier, num_tokens in self.unrated_tokens.items()}
        if BLENDED in request.tokens and request.times is not None:
            saved[BLENDED] = _saved_by_blending(request.tokens, rate, request.times.load_seconds)
        for tier, seconds in saved.items():
            self.saved_prefill_seconds[tier] += seconds
            self.saved_gpu_seconds += seconds * request.engine.num_gpus
        self.unrated_tokens.clear()

    def note_first_token(self, request: ExplainedRequest) -> None:
        """Count the time to the first token of a request, if it is known.

        Leaves out a request whose load failed: it waited for tokens that it then computed, and so is neither
        a hit nor like a request without one.
        """
        if request.times is None or not request.times.first_token_seconds or LOAD_FAILED in request.tokens:
            return
        by_source = self.first_tokens.setdefault(length_bucket(sum(request.tokens.values())), {})
        numbers = by_source.setdefault(request.source, {})
        bucket = latency_bucket(request.times.first_token_seconds)
        numbers[bucket] = numbers.get(bucket, 0) + 1

    def hold(self, num_bytes: Mapping[str, int], now: float) -> None:
        """Record the bytes of each tier from now on. ``now``: seconds of a monotonic clock."""
        for tier, held in self._held.items():
            self.tier_byte_seconds[tier] += held * (now - self._held_at)
        self._held, self._held_at = num_bytes, now


def _saved_by_blending(tokens: Mapping[str, int], rate: float, seconds: float) -> float:
    """Return the least time that a blended prompt saved, in seconds.

    Blending takes the engine's time, of which only a bound is known: the ``seconds`` from the beginning of
    the load to its end. Recomputed tokens are part of that time, and save nothing themselves.
    """
    num_blended, num_recomputed = tokens[BLENDED], tokens.get(RECOMPUTED, 0)
    return max(0.0, min(num_blended / rate, (num_blended + num_recomputed) / rate - seconds))
