"""Reasons of autoscaling decisions as sentences for users. Pure."""

from __future__ import annotations

from lmcache_operator.policy.state import Step
from lmcache_operator.policy.tier import Gain, Tier


def change(tier: Tier, present: float, target: float, gain: Gain) -> str:
    """Say what another size gains and costs."""
    sizes = f"{tier.describe(target)} instead of {bare_size(tier, present)}"
    hits, saved, paid = 100 * abs(gain.hits), usd(gain.saved), usd(gain.paid)
    if target > present:
        price = f"{paid} of memory" if gain.paid else "memory without a price"
        return f"{sizes}: {hits:.1f} percentage points more hits, {saved} of GPU time, for {price}"
    return f"{sizes}: {paid} of memory less, and {hits:.1f} percentage points fewer hits, {saved} of GPU time"


def nothing_better(tier: Tier, present: float, threshold: float) -> str:
    """Say that no size within the bounds is worth a change."""
    lowest, highest = (bare_size(tier, size) for size in (tier.sizes[0], tier.sizes[-1]))
    return (
        f"no size between {lowest} and {highest} saves at least {usd(threshold)} more than "
        f"{tier.describe(present)}"
    )


def similar(tier: Tier, present: float, best: float, gain: Gain) -> str:
    """Say that the best size is too similar to the present one to be worth a change."""
    saved = f"{tier.describe(best)} would save {usd(gain.net)} more than {bare_size(tier, present)}"
    return f"{saved}: too little for such a small change"


def locality(loss: float, lost: float) -> str:
    """Say what routing loses, and how to avoid it."""
    return (
        f"{100 * loss:.1f} % of prompt tokens miss because another pod holds them. This costs {usd(lost)}, "
        "more than any larger size would save. Route requests by prefix or by session"
    )


def reverted(tier: Tier, step: Step, gained: float, predicted: float) -> str:
    """Say that a step did not bring the predicted hits, and that the tier returns to its old size."""
    direction, old = "fewer" if round(gained, 3) < 0 else "more", tier.describe(step.old)
    return (
        f"back to {old}: {tier.describe(step.new)} hit {100 * abs(gained):.1f} % {direction} prompt tokens, "
        f"not {100 * predicted:.1f} % as predicted"
    )


def bare_size(tier: Tier, size: float) -> str:
    """Format a size without the words after it: ``64Gi`` for ``64Gi per pod``, ``3`` for ``3 shards``."""
    return tier.describe(size).partition(" ")[0]


def usd(amount: float) -> str:
    """Format the absolute value of an amount of money per hour."""
    return f"{abs(amount):.{2 if abs(amount) >= 0.1 else 3}f} USD/h"
