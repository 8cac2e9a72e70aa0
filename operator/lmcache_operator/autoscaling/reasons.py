"""Sentences for people: why a size is what it is. Pure."""

from __future__ import annotations

from lmcache.units import format_size
from lmcache_operator.autoscaling.state import Step
from lmcache_operator.autoscaling.tier import Gain, Tier


def change(tier: Tier, present: float, target: float, gain: Gain) -> str:
    """What another size brings, and what it costs."""
    sizes = f"{tier.describe(target)} instead of {size_of_copy(tier, present)}"
    hits, saved, paid = 100 * abs(gain.hits), usd(gain.saved), usd(gain.paid)
    if target > present:
        price = f"{paid} of memory" if gain.paid else "memory that costs nothing"
        return f"{sizes}: {hits:.1f} % more prompt tokens hit, {saved} of GPU time, for {price}"
    return f"{sizes}: {paid} of memory less, and {hits:.1f} % fewer prompt tokens hit, {saved} of GPU time"


def nothing_better(tier: Tier, present: float, threshold: float) -> str:
    """All sizes were looked at."""
    lowest, highest = (size_of_copy(tier, size) for size in (tier.sizes[0], tier.sizes[-1]))
    return (
        f"no size between {lowest} and {highest} is better than {tier.describe(present)} by more than "
        f"{usd(threshold)}"
    )


def similar(tier: Tier, present: float, best: float, gain: Gain) -> str:
    """The best size is too near to be gone to."""
    saved = f"{tier.describe(best)} would save {usd(gain.net)} more than {size_of_copy(tier, present)}"
    return f"{saved}: too little for a change to a size so near"


def locality(loss: float, lost: float) -> str:
    """What is lost is not lost to size."""
    return (
        f"{100 * loss:.1f} % of prompt tokens miss because another pod holds them, {usd(lost)}: more than "
        "any growth would bring. Routing by prefix or by session would save that"
    )


def taken_back(tier: Tier, step: Step, got: float, predicted: float) -> str:
    """A step was wrong."""
    what = "more" if step.new > step.old else "fewer"
    return (
        f"{tier.describe(step.new)} hit {100 * abs(got):.1f} % {what} than {tier.describe(step.old)}, and "
        f"not {100 * predicted:.1f} % as predicted: back to {tier.describe(step.old)}"
    )


def size_of_copy(tier: Tier, size: float) -> str:
    """A size, when what it is a size of was said before."""
    return tier.describe(size).partition(" ")[0]


def size_of(num_bytes: float) -> str:
    """Bytes as Kubernetes writes them."""
    return format_size(round(num_bytes))


def usd(amount: float) -> str:
    """Money per hour; what it is for tells the sign."""
    return f"{abs(amount):.{2 if abs(amount) >= 0.1 else 3}f} USD/h"


def span(seconds: float) -> str:
    """A stretch of time."""
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{max(0.0, seconds) / 60:.0f} min"
