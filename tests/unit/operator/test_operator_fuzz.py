"""Thousands of random specs, valid and broken.

The operator neither stops nor loops on any of them, and names the field of each spec that it refuses.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.harness.settled_specs import check
from tests.harness.spec_fuzz import spec, spec_of_init_container


def kind_in(generated: Any) -> str:
    engine = generated.get("engine") if isinstance(generated, dict) else None
    return str(engine.get("kind", "vLLM")) if isinstance(engine, dict) else ""


@pytest.mark.parametrize("thousand", [0, 1])
def test_random_specs_settle_or_are_refused_with_their_field(thousand: int) -> None:
    num_refused, kinds = 0, Counter[str]()
    with asyncio.Runner() as runner:
        for seed in range(1000 * thousand, 1000 * (thousand + 1)):
            generated, _ = spec(seed)
            is_refused = check(runner, generated, f"seed {seed}")
            num_refused += is_refused
            kinds[kind_in(generated)] += not is_refused
    # The generator must produce valid and invalid specs, otherwise the test proves nothing.
    assert 100 < num_refused < 900
    assert min(kinds["vLLM"], kinds["SGLang"]) > 50


def test_random_specs_with_init_containers_settle_or_are_refused() -> None:
    with asyncio.Runner() as runner:
        num_refused = sum(check(runner, spec_of_init_container(seed), f"seed {seed}") for seed in range(500))
    assert 50 < num_refused < 450
