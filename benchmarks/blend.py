"""How far answers from blended KV are from those of a full prefill, by the share of tokens computed anew."""

from __future__ import annotations

from itertools import pairwise

from benchmarks.report import Figure, Report, at_most
from testing.blend.experiment import RATIOS, divergences, name_of
from testing.blend.train import trained_model

NUM_PROMPTS = 128
ALLOWED_PERCENT = 20.0
RATIO_OF_BAR = 0.15


def run() -> Report:
    found = divergences(trained_model(), NUM_PROMPTS)
    means = {name: float(values.mean()) for name, values in found.items()}
    naive, computed = means[name_of(0)], means[name_of(RATIO_OF_BAR)]
    falling = [means[name_of(ratio)] for ratio in RATIOS]
    is_monotone = all(before > after for before, after in pairwise(falling))
    figures = [Figure(f"KL divergence, computed anew: {name}", mean, "nats") for name, mean in means.items()]
    figures.append(Figure("it falls with the ratio", float(is_monotone), "", "always", is_monotone))
    figures.append(at_most("at 15 %, of what it is at 0 %", 100 * computed / naive, "%", ALLOWED_PERCENT))
    conditions = f"a small trained Llama, three documents stored alone and a question, {NUM_PROMPTS} prompts"
    return Report("blend", conditions, figures)
