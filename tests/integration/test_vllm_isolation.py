"""Inputs that KV depends on besides tokens: requests that differ in them share no KV, equal requests do.

The tests use vLLM's own scheduler and block hashes with a simulated model whose KV depends on all inputs.
KV of another request would be a wrong read.
"""

import hashlib
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)

from lmcache_client.core import files
from testing.child_process import wait_until
from testing.deadlines import SIMULATED
from tests.harness.client.fake_model import Content, TokenChain
from tests.harness.scope import examples, third
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.engine import SimEngine
from tests.harness.sim.world import SimWorld, assert_idle, make_tokens, world

DEADLINES = SIMULATED

__all__ = ["world"]

pytestmark = pytest.mark.vllm

LENGTH = 3 * CHUNK + 10
MEDIUM_START, HIDDEN = CHUNK + 6, 8
SEEDS = itertools.count(1, 2)
TAIL = range(CHUNK + 6, LENGTH)


@dataclass(frozen=True)
class Variant:
    """A variant of a request: its inputs besides the shared tokens."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of vLLM's request."""
    content: Content = field(default_factory=dict)
    """Inputs of the simulated model that the fields stand for."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Tokens that differ from the shared ones, by position."""

    def add(self, engine: SimEngine, tokens: list[int], max_tokens: int = 1) -> str:
        prompt = [self.tokens.get(place, token) for place, token in enumerate(tokens)]
        return engine.add(prompt, max_tokens, content=self.content, **self.fields)


PLAIN = Variant()


def salted(salt: str) -> Variant:
    return Variant({"cache_salt": salt})


def adapted(folder, name: str) -> Variant:
    """An adapter: clients may give one name to different weights."""
    path = folder / f"adapter-{name}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(name.encode())
    return Variant({"lora_request": LoRARequest("mine", 1, str(path))}, {0: name.encode()})


def medium(content: str, modality: str = "image", start: int = MEDIUM_START, identifier: str = "") -> Variant:
    """A picture or a sound. vLLM hashes it, unless the client names it."""
    data = torch.tensor(list(content.encode()), dtype=torch.float32)
    item = MultiModalKwargsItem({"data": MultiModalFieldElem(data, MultiModalSharedField(batch_size=1))})
    name = identifier or hashlib.sha256(f"{modality} {content}".encode()).hexdigest()
    feature = MultiModalFeatureSpec(item, modality, name, PlaceholderRange(start, 40), name)
    return Variant({"mm_features": [feature]}, {start: f"{modality} {content}".encode()})


def embedded(seed: int, *places: int) -> Variant:
    """Embeddings in place of tokens, at all positions or at these. Seed 0 gives rows of zeros."""
    rows = torch.rand(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed)) * (seed > 0)
    positions = set(places or range(LENGTH))
    content = {place: b"row" + rows[place].numpy().tobytes() for place in positions}
    fields: dict[str, Any] = {"prompt_embeds": rows, "prompt_token_ids": None}
    if places:
        mask = [place not in positions for place in range(LENGTH)]
        rows[mask] = 0  # vLLM fills them in the same way
        del fields["prompt_token_ids"]
        fields["prompt_is_token_ids"] = mask
    return Variant(fields, content, dict.fromkeys(positions, 0))


def zero_tokens(variant: Variant) -> Variant:
    """Set the tokens of the tail to 0, except those that the variant defines."""
    return replace(variant, tokens=dict.fromkeys(TAIL, 0) | variant.tokens)


PAIRS: dict[str, Callable[[Path, int], tuple[Variant, Variant, int]]] = {
    "salt": lambda *_: (salted("a"), salted("b"), 0),
    "a salt or none": lambda *_: (salted("a"), PLAIN, 0),
    "adapter": lambda folder, _: (adapted(folder, "one"), adapted(folder, "two"), 0),
    "an adapter or none": lambda folder, _: (adapted(folder, "one"), PLAIN, 0),
    "image": lambda *_: (medium("cat"), medium("dog"), CHUNK),
    "an image or none": lambda *_: (medium("cat"), PLAIN, CHUNK),
    "place of an image": lambda *_: (medium("cat"), medium("cat", start=2 * CHUNK + 1), CHUNK),
    "audio": lambda *_: (medium("la", "audio"), medium("lo", "audio"), CHUNK),
    "modality": lambda *_: (medium("la", "audio"), medium("la", "image"), CHUNK),
    "prompt embeds": lambda _, seed: (embedded(seed), embedded(seed + 1), 0),
    "embeds or tokens": lambda *_: (embedded(1, *TAIL), PLAIN, CHUNK),
    "embeds within tokens": lambda *_: (embedded(1, *TAIL), embedded(2, *TAIL), CHUNK),
    # The block hashes of vLLM are equal here.
    "zero rows or tokens": lambda *_: (embedded(0, *TAIL), zero_tokens(embedded(0, LENGTH - 1)), CHUNK),
}
"""Pairs of variants by kind, each with the number of leading tokens that may be shared."""


@pytest.fixture
def variants(tmp_path):
    seed = next(SEEDS)
    return {name: pair(tmp_path, seed) for name, pair in PAIRS.items()}


@pytest.fixture(autouse=True)
def _engines_start_later(monkeypatch):
    """Engines start after the adapter files were written. Otherwise the files would count as changed."""
    later = time.time() + 3600
    monkeypatch.setattr(files, "process_start_time", lambda: later)


def run(engine: SimEngine, variant: Variant, tokens: list[int]) -> int:
    """Run one request to its end. Returns the number of its cached tokens."""
    name = variant.add(engine, tokens)
    engine.run(name)
    engine.run()
    engine.forget()
    return engine.results[name].num_cached_tokens


@pytest.mark.parametrize(("name", "runner"), third(list(itertools.product(PAIRS, (1, 2)))))
def test_equal_requests_share_kv_and_different_ones_do_not(
    world: SimWorld, variants: dict[str, Any], name: str, runner: int
) -> None:
    first, second, num_shared = variants[name]
    tokens = make_tokens(LENGTH)
    with world.engines(SimSettings(runner=runner), SimSettings()) as (engine, other_engine):
        # An adapter is hashed in the background, and its KV is not cached before.
        wait_until(lambda: run(engine, first, tokens) == 3 * CHUNK, what="a hit of an equal request")
        assert run(engine, second, tokens) <= num_shared
        wait_until(lambda: run(engine, second, tokens) == 3 * CHUNK, what="a hit of the second variant")
        for variant in (second, first):
            wait_until(
                lambda variant=variant: run(other_engine, variant, tokens) == 3 * CHUNK,
                what="a hit elsewhere",
            )
        assert_idle(engine)
        assert_idle(other_engine)


def test_same_client_name_for_two_pictures_is_never_confused(world: SimWorld) -> None:
    """One engine stops caching the name, because vLLM itself confuses the pictures."""
    tokens = make_tokens(LENGTH)
    cat, dog = medium("cat", identifier="my picture"), medium("dog", identifier="my picture")
    with world.engines(SimSettings(), SimSettings()) as (first, second):
        wait_until(lambda: run(first, cat, tokens) == 3 * CHUNK, what="a hit of the first")
        assert run(second, dog, tokens) <= CHUNK, "only the text before the picture may be shared"
        wait_until(lambda: run(second, dog, tokens) == 3 * CHUNK, what="a hit of the second")
        assert run(first, dog, tokens) == run(first, cat, tokens) == 0
        assert_idle(first)
        assert_idle(second)


@pytest.mark.parametrize("runner", [1, 2])
def test_resumable_sessions_are_neither_loaded_nor_stored(world: SimWorld, runner: int) -> None:
    """A session's tokens are replaced after they were hashed: its last sampled token is dropped."""
    tokens, more = make_tokens(LENGTH), make_tokens(LENGTH)
    with world.engines(SimSettings(runner=runner, num_blocks=96)) as (engine,):

        def pause() -> None:
            for _ in range(1000):
                if engine.scheduler.num_waiting_for_streaming_input:
                    return
                engine.step()
            raise AssertionError("the session does not wait for its next piece")

        name = engine.add(tokens, 20, resumable=True)
        pause()
        # Another request has the session's prompt. At first it finds nothing, and then all of it.
        assert run_during_session(engine, tokens) == 0
        wait_until(lambda: run_during_session(engine, tokens) == 3 * CHUNK, what="a hit")
        engine.add(more, 20, name=name, resumable=True)
        pause()
        whole = list(engine.scheduler.requests[name].all_token_ids)
        assert whole[:LENGTH] == tokens
        assert whole[-20 - LENGTH : -20] == more
        engine.add([0], 1, name=name)  # the end of the session
        engine.run()
        assert run_during_session(engine, whole) <= 3 * CHUNK, "only chunks of the other request may be found"
        second_session = engine.add(tokens, 20, resumable=True)
        pause()
        assert engine.results[second_session].num_cached_tokens == 0
        engine.add([0], 1, name=second_session)
        engine.run()
        assert not engine.leftovers()
        assert_idle(engine)


def run_during_session(engine: SimEngine, tokens: list[int]) -> int:
    """Run a request to its end, including its stores, while a session waits."""
    name = engine.add(tokens)
    engine.run(name)
    wait_until(lambda: not (engine.step() or engine.leftovers()), what="the end of the stores")
    return engine.results[name].num_cached_tokens


arrivals = st.tuples(
    st.integers(0, 1),  # the engine
    st.sampled_from(list(PAIRS)),
    st.integers(0, 1),  # the variant
    st.sampled_from((1, CHUNK + 8)),  # tokens of the answer
    st.integers(0, 6),  # steps until the next request arrives
)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(arrivals, min_size=4, max_size=14),
    st.sampled_from((1, 2)),
    st.sampled_from((64, 160)),
    st.booleans(),
)
def test_concurrent_requests_read_only_their_own_kv(
    world: SimWorld,
    variants: dict[str, Any],
    requests: list[Any],
    runner: int,
    num_tokens: int,
    is_async: bool,
) -> None:
    """All requests have the same tokens at the same time, and differ only in their variants."""
    tokens = make_tokens(LENGTH)
    shape = SimSettings(
        runner=runner, num_blocks=48, max_num_batched_tokens=num_tokens, is_async=is_async,
        has_prefix_caching=False,
    )  # fmt: skip
    with world.engines(shape, shape) as engines:
        added = []
        for number, name, index, num_answer, num_steps in requests:
            variant = variants[name][index]
            added.append(
                (engines[number], variant.add(engines[number], tokens, num_answer), variant, num_answer)
            )
            for _ in range(num_steps):
                for engine in engines:
                    engine.step()
        for engine in engines:
            engine.run()
            assert_idle(engine)
        for engine, request, variant, num_answer in added:
            prompt = [variant.tokens.get(place, token) for place, token in enumerate(tokens)]
            expected = TokenChain(prompt, b"", variant.content)
            for _ in range(num_answer):
                expected.tokens += expected.continuation()
            assert engine.results[request].tokens == expected.tokens[LENGTH:]
