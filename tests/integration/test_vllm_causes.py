"""Causes of computed tokens, as a sidecar counts them for engines under vLLM's scheduler."""

import json
import re
from collections import Counter

import pytest
from vllm.lora.request import LoRARequest

from testing.child_process import wait_until
from testing.deadlines import CALLS
from tests.harness.commands.sidecar_command import explain
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.world import make_tokens, only_engine, wait_reported, world

DEADLINES = CALLS

__all__ = ["world"]

pytestmark = pytest.mark.vllm

SETTINGS = SimSettings(num_blocks=256)


def causes_of(sidecar, engine, *prompts) -> dict[str, int]:
    """Causes of the tokens of these prompts, once the sidecar knows them."""
    wait_reported(engine)
    before = sidecar.stats()["causes"]
    for prompt in prompts:
        engine.serve(prompt)
        # Rows can't be evicted for the next prompt before the sidecar has their checksums.
        sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
    end = before["prompt_tokens"] + sum(map(len, prompts))
    sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] >= end)
    after = sidecar.stats()["causes"]
    assert after["prompt_tokens"] == end
    return dict(Counter(after["cause_tokens"]) - Counter(before["cause_tokens"]))


def test_prompts_larger_than_the_cache_are_evicted():
    prompts = [make_tokens(8 * CHUNK + 1) for _ in range(60)]
    with only_engine(SETTINGS, memory_size="4Mi") as (sidecar, engine):
        causes_of(sidecar, engine, *prompts)
        num_rows = sidecar.stats()["memory"]["usable_rows"]
        more = [make_tokens(8 * CHUNK + 1) for _ in range(num_rows // 8)]
        causes_of(sidecar, engine, *more)
        again = causes_of(sidecar, engine, *prompts)
        causes_of(sidecar, engine, *prompts)
        advice = " ".join(explain(sidecar)[1].split())
    assert "were stored before, were evicted, and were computed again." in advice
    assert re.search(
        r"A memory tier of [0-9.]+ x the size \([0-9.]+Mi\) would have kept [0-9]+ % of them", advice
    )
    assert max(again, key=lambda cause: again[cause]) == "evicted"
    assert again == {"evicted": 60 * 8 * CHUNK, "tail": 60}


def test_engine_that_was_reset_shows_why_its_kv_is_private():
    prompt = make_tokens(2 * CHUNK + 1)
    with only_engine(SETTINGS) as (sidecar, engine):
        causes_of(sidecar, engine, prompt)
        assert sidecar.stats()["private_reason"] == ""
        assert engine.reset(b"new weights")
        causes_of(sidecar, engine, prompt)
        stats = sidecar.stats()
        assert stats["private_reason"].startswith("vLLM's caches were reset at ")
        assert {client["private_reason"] for client in stats["clients"]} == {"", stats["private_reason"]}
        assert stats["private_reason"] in " ".join(explain(sidecar)[1].split())
        assert json.loads(explain(sidecar, "--output", "json")[1])["private_reasons"] == [
            stats["private_reason"]
        ]


def test_adapter_that_is_younger_than_the_engine_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    adapter = LoRARequest("legal", 1, str(tmp_path))
    with only_engine(SETTINGS) as (sidecar, engine):
        wait_until(
            lambda: (
                engine.serve(make_tokens(CHUNK + 1), lora_request=adapter)
                and sidecar.stats()["causes"]["uncached_reason"].endswith(
                    "restart the engine to share its KV"
                )
            ),
            what="a reason from the hashed files",
        )
        (page, *_) = json.loads(sidecar.get("/requests"))["requests"]
        for text in explain(sidecar)[1], explain(sidecar, "--request-id", page["request_id"])[1]:
            assert "cannot be cached: adapter legal can't be identified: " in " ".join(text.split())
