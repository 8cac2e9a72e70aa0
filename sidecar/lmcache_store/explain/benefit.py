"""Savings and costs of the cache, from the ``/stats`` of one sidecar or of several. Pure.

Saved GPU time has the price that the sizing of tiers uses: one token is worth ``gpus * gpu_hour / 3600 /
prefill_tokens_per_second``. The sidecar divides tokens by the speed of their engine when it counts them.

The time to the first token is compared between requests of similar length: the lengths of their prompts lie
between the same powers of two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from lmcache_store.causes import TIERS
from lmcache_store.common.prices import GIB, Prices
from lmcache_store.explain import merge

TokenSource = Literal["tier", "engine", "none"]
"""Place of a request's first tokens: in a tier, only in the engine's own cache, or nowhere."""

FirstTokenCounts = dict[str, dict[str, dict[str, int]]]
"""Numbers of requests by length of the prompt, source, and time to the first token. Keys are upper bounds."""

_PER_OCTAVE = 4  # latency buckets: a quantile is exact to 10 %
_FASTEST, _SLOWEST = -14 * _PER_OCTAVE, 9 * _PER_OCTAVE  # 60 us to 512 s
_LONGEST = 24


def length_bucket(num_tokens: int) -> str:
    """Return the power of two that bounds a prompt's length."""
    return str(1 << min(_LONGEST, max(0, num_tokens - 1).bit_length()))


def latency_bucket(seconds: float) -> str:
    """Return the upper bound of a duration, in seconds."""
    number = math.ceil(_PER_OCTAVE * math.log2(seconds)) if seconds > 0 else _FASTEST
    return _bound(max(_FASTEST, min(_SLOWEST, number)))


def _bound(number: int) -> str:
    return f"{2 ** (number / _PER_OCTAVE):.4g}"


_BUCKETS = frozenset(map(_bound, range(_FASTEST, _SLOWEST + 1)))


class SavedLatency(NamedTuple):
    """Time to the first token that hits saved, in seconds; negative: hits took longer."""

    p50: float
    p95: float
    num_requests: int
    """Requests with hits for which like requests without hits were seen."""


class Benefit(NamedTuple):
    """Savings and costs of the cache since its sidecars started."""

    num_sidecars: int
    """Sidecars whose figures are included."""
    num_silent: int
    """Sidecars that count no benefit yet: they are starting."""
    uptime_seconds: float
    """Time since the start of the oldest sidecar."""
    loaded_tokens: Mapping[str, int]
    """Tokens that engines loaded, by tier. Hits in the engine's own cache are not included."""
    unrated_tokens: int
    """Tokens among these whose saving is not known, because the engine's speed is not known yet."""
    prefill_seconds: float
    """Seconds that engines would have needed to compute the loaded tokens."""
    gpu_hours: float
    saved_usd: float
    wait_seconds: float
    """Seconds for which requests were held back, in total."""
    load_seconds: float
    """Seconds of all loads."""
    gib_hours: Mapping[str, float]
    """GiB-hours of memory and shards, and of disk, by tier."""
    spent_usd: Mapping[str, float]
    """Costs by tier."""
    num_hits: int
    """Requests that loaded tokens and whose first token was measured."""
    saved_latency: SavedLatency | None
    """Time that hits save; None: not known, because no request of similar length without a hit was seen."""

    @property
    def net_usd(self) -> float:
        """Savings minus costs."""
        return self.saved_usd - sum(self.spent_usd.values())


def benefit(stats: Sequence[Mapping[str, Any]], prices: Prices, shard_bytes: float = 0.0) -> Benefit:
    """Return the benefit that these sidecars counted together.

    Args:
        stats: ``/stats`` of each sidecar. Values of a wrong type count as nothing.
        prices: prices of the cluster.
        shard_bytes: bytes of all shards of the remote tier; 0: none, or not known. Sidecars share them, so
            their figures do not contain it.
    """
    counted = [report for report in stats if merge.part(report, "benefit")]
    uptime = max((merge.count(report.get("uptime_seconds")) for report in counted), default=0.0)
    tokens = merge.sums(counted, "causes", "cause_tokens")
    held = merge.sums(counted, "benefit", "tier_byte_seconds") | {"remote": shard_bytes * uptime}
    gib_hours = {tier: held.get(tier, 0.0) / GIB / 3600 for tier in TIERS}
    usd_per_gib_hour = {
        "memory": prices.memory_gib_hour,
        "disk": prices.disk_gib_hour,
        "peers": 0.0,  # the other pods' memory is counted there
        "remote": prices.shard_gib_hour,
    }
    gpu_hours = merge.total(counted, "benefit", "saved_gpu_seconds") / 3600
    first_tokens = merged(merge.part(report, "benefit", "first_tokens") for report in counted)
    return Benefit(
        num_sidecars=len(counted),
        num_silent=len(stats) - len(counted),
        uptime_seconds=uptime,
        loaded_tokens={tier: int(tokens[tier]) for tier in TIERS if tier in tokens},
        unrated_tokens=int(sum(merge.sums(counted, "benefit", "unrated_tokens").values())),
        prefill_seconds=sum(merge.sums(counted, "benefit", "saved_prefill_seconds").values()),
        gpu_hours=gpu_hours,
        saved_usd=gpu_hours * prices.gpu_hour,
        wait_seconds=merge.total(counted, "benefit", "wait_seconds"),
        load_seconds=sum(merge.sums(counted, "benefit", "load_seconds").values()),
        gib_hours=gib_hours,
        spent_usd={tier: gib_hours[tier] * usd_per_gib_hour[tier] for tier in TIERS},
        num_hits=sum(sum(sources.get("tier", {}).values()) for sources in first_tokens.values()),
        saved_latency=saved_latency(first_tokens),
    )


def usd_per_token(stats: Iterable[Mapping[str, Any]], prices: Prices) -> float:
    """Return the price of computing one token, as the mean over all prompt tokens.

    Returns 0 if no speed is known, and on CPUs.
    """
    usd = tokens = 0.0
    for report in stats:
        lookups = merge.part(report, "lookups")
        speed = merge.count(lookups.get("prefill_tokens_per_second"))
        number = merge.count(merge.part(report, "causes").get("prompt_tokens"))
        if speed and number and lookups.get("computes_on_cpu") is not True:
            price = merge.count(lookups.get("gpus")) * prices.gpu_hour / 3600 / speed
            usd, tokens = usd + number * price, tokens + number
    return usd / tokens if tokens else 0.0


def merged(parts: Iterable[Mapping[str, Any]]) -> FirstTokenCounts:
    """Return the sum of several sidecars' numbers. Leaves out what is no such number."""
    total: FirstTokenCounts = {}
    for part in parts:
        for length, source in itertools.product(part, get_args(TokenSource)):
            for bucket, number in merge.part(part, length, source).items():
                if bucket in _BUCKETS and (requests := int(merge.count(number))):
                    into = total.setdefault(length, {}).setdefault(source, {})
                    into[bucket] = into.get(bucket, 0) + requests
    return total


def saved_latency(first_tokens: FirstTokenCounts) -> SavedLatency | None:
    """Return the mean difference of quantiles between like requests, weighted by the requests with hits."""
    pairs = list(_like_requests(first_tokens))
    num_requests = sum(sum(hits.values()) for hits, _ in pairs)
    if not num_requests:
        return None

    def saved(share: float) -> float:
        differences = (
            (quantile(misses, share) - quantile(hits, share)) * sum(hits.values()) for hits, misses in pairs
        )
        return sum(differences) / num_requests

    return SavedLatency(saved(0.5), saved(0.95), num_requests)


def quantile(numbers: Mapping[str, int], share: float) -> float:
    """Return the duration in seconds that ``share`` of the requests did not exceed.

    ``numbers``: requests by ``latency_bucket``, at least one. Inside a bucket, durations are taken to be
    spread evenly on a logarithmic scale.
    """
    wanted, before = share * sum(numbers.values()), 0
    buckets = sorted((float(bound), number) for bound, number in numbers.items() if number)
    for bound, number in buckets:
        if before + number >= wanted:
            return float(bound * 2 ** (((wanted - before) / number - 1) / _PER_OCTAVE))
        before += number
    return buckets[-1][0]


def _like_requests(first_tokens: FirstTokenCounts) -> Iterator[tuple[Mapping[str, int], Mapping[str, int]]]:
    """Yield requests with hits and requests without, for each length of prompts that has both."""
    for sources in first_tokens.values():
        hits, misses = sources.get("tier", {}), sources.get("none", {})
        if hits and misses:
            yield hits, misses
