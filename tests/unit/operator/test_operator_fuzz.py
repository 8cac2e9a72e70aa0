"""Hundreds of random specs, valid and broken.

The operator neither stops nor loops on any of them, and names the field of each spec that it refuses.
"""

import asyncio
from collections import Counter
from typing import Any

from tests.harness.operator.settled_specs import check
from tests.harness.operator.spec_fuzz import seeds, spec, spec_of_init_container


def kind_in(generated: Any) -> str:
    engine = generated.get("engine") if isinstance(generated, dict) else None
    return str(engine.get("kind", "vLLM")) if isinstance(engine, dict) else ""


def test_random_specs_settle_or_are_refused_with_their_field() -> None:
    num_refused, kinds, numbers = 0, Counter[str](), seeds(1500)
    with asyncio.Runner() as runner:
        for seed in numbers:
            generated, _ = spec(seed)
            is_refused = check(runner, generated, f"seed {seed}")
            num_refused += is_refused
            kinds[kind_in(generated)] += not is_refused
    # The generator must produce valid and invalid specs, otherwise the test proves nothing.
    assert 0.1 < num_refused / len(numbers) < 0.9
    assert min(kinds["vLLM"], kinds["SGLang"]) > len(numbers) / 40


def test_random_specs_with_init_containers_settle_or_are_refused() -> None:
    numbers = seeds(300)
    with asyncio.Runner() as runner:
        num_refused = sum(check(runner, spec_of_init_container(seed), f"seed {seed}") for seed in numbers)
    assert 0.02 < num_refused / len(numbers) < 0.9
