"""What KV depends on beside tokens: requests that differ only in it never share KV, and equal ones do.

vLLM's own scheduler and block hashes over a model whose KV depends on all of it: KV of another request would
be a wrong read.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from dataclasses import dataclass, field, replace
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

from lmcache.engines.vllm import files
from testing.child_process import wait_until
from tests.harness.fake_model import Content, TokenChain
from tests.harness.sim_config import CHUNK, SimSettings
from tests.harness.sim_engine import SimEngine
from tests.harness.sim_world import SimWorld, assert_idle, make_tokens, world

__all__ = ["world"]

pytestmark = pytest.mark.vllm

LENGTH = 3 * CHUNK + 10
MEDIUM_AT, HIDDEN = CHUNK + 6, 8
SEEDS = itertools.count(1, 2)
TAIL = range(CHUNK + 6, LENGTH)


@dataclass(frozen=True)
class Variant:
    """One way in which a request is what it is."""

    fields: dict[str, Any] = field(default_factory=dict)
    """Of vLLM's request."""
    content: Content = field(default_factory=dict)
    """What they mean to the model."""
    tokens: dict[int, int] = field(default_factory=dict)
    """That are other than those of the rest."""

    def add(self, engine: SimEngine, tokens: list[int], max_tokens: int = 1) -> str:
        prompt = [self.tokens.get(place, token) for place, token in enumerate(tokens)]
        return engine.add(prompt, max_tokens, content=self.content, **self.fields)


PLAIN = Variant()


def salted(salt: str) -> Variant:
    return Variant({"cache_salt": salt})


def adapted(folder, name: str) -> Variant:
    """Different weights under one name: clients give it."""
    path = folder / f"adapter-{name}"
    path.mkdir(exist_ok=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(name.encode())
    return Variant({"lora_request": LoRARequest("mine", 1, str(path))}, {0: name.encode()})


def medium(content: str, modality: str = "image", at: int = MEDIUM_AT, identifier: str = "") -> Variant:
    """A picture or a sound; vLLM hashes it, unless the client names it."""
    data = torch.tensor(list(content.encode()), dtype=torch.float32)
    item = MultiModalKwargsItem({"data": MultiModalFieldElem(data, MultiModalSharedField(batch_size=1))})
    name = identifier or hashlib.sha256(f"{modality} {content}".encode()).hexdigest()
    feature = MultiModalFeatureSpec(item, modality, name, PlaceholderRange(at, 40), name)
    return Variant({"mm_features": [feature]}, {at: f"{modality} {content}".encode()})


def embedded(seed: int, *places: int) -> Variant:
    """Embeddings instead of tokens: of all, or at these places; with seed 0 rows of zeros."""
    rows = torch.rand(LENGTH, HIDDEN, generator=torch.Generator().manual_seed(seed)) * (seed > 0)
    where = set(places or range(LENGTH))
    content = {place: b"row" + rows[place].numpy().tobytes() for place in where}
    fields: dict[str, Any] = {"prompt_embeds": rows, "prompt_token_ids": None}
    if places:
        mask = [place not in where for place in range(LENGTH)]
        rows[mask] = 0  # as vLLM fills it
        del fields["prompt_token_ids"]
        fields["prompt_is_token_ids"] = mask
    return Variant(fields, content, dict.fromkeys(where, 0))


def zero_tokens(variant: Variant) -> Variant:
    """The token 0 from there on, where the variant does not say otherwise."""
    return replace(variant, tokens=dict.fromkeys(TAIL, 0) | variant.tokens)


@pytest.fixture
def variants(tmp_path):
    """Two of each kind, and the tokens in front that they share."""
    folder, seed = tmp_path, next(SEEDS)
    return {
        "salt": (salted("a"), salted("b"), 0),
        "a salt or none": (salted("a"), PLAIN, 0),
        "adapter": (adapted(folder, "one"), adapted(folder, "two"), 0),
        "an adapter or none": (adapted(folder, "one"), PLAIN, 0),
        "image": (medium("cat"), medium("dog"), CHUNK),
        "an image or none": (medium("cat"), PLAIN, CHUNK),
        "place of an image": (medium("cat"), medium("cat", at=2 * CHUNK + 1), CHUNK),
        "audio": (medium("la", "audio"), medium("lo", "audio"), CHUNK),
        "modality": (medium("la", "audio"), medium("la", "image"), CHUNK),
        "prompt embeds": (embedded(seed), embedded(seed + 1), 0),
        "embeds or tokens": (embedded(1, *TAIL), PLAIN, CHUNK),
        "embeds within tokens": (embedded(1, *TAIL), embedded(2, *TAIL), CHUNK),
        # vLLM's block hashes are the same here.
        "rows of zeros or the token 0": (embedded(0, *TAIL), zero_tokens(embedded(0, LENGTH - 1)), CHUNK),
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _engines_begin_later(monkeypatch):
    """Than what is written here: else it would count as changed under them."""
    later = time.time() + 3600
    monkeypatch.setattr(files, "process_began", lambda: later)


def run(engine: SimEngine, variant: Variant, tokens: list[int]) -> int:
    """One request to its end; how many of its tokens were found."""
    name = variant.add(engine, tokens)
    engine.run(name)
    engine.run()
    engine.forget()
    return engine.results[name].num_cached_tokens


NAMES = (
    "salt", "a salt or none", "adapter", "an adapter or none", "image", "an image or none",
    "place of an image", "audio", "modality", "prompt embeds", "embeds or tokens", "embeds within tokens",
    "rows of zeros or the token 0",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("runner", [1, 2])
def test_who_differs_shares_nothing_and_who_is_equal_all(
    world: SimWorld, variants: dict[str, Any], name: str, runner: int
) -> None:
    one, other, num_shared = variants[name]
    tokens = make_tokens(LENGTH)
    with world.engines(SimSettings(runner=runner), SimSettings()) as (engine, second):
        # An adapter is hashed in the background: until then it is not cached.
        wait_until(lambda: run(engine, one, tokens) == 3 * CHUNK, what="a hit of an equal request")
        assert run(engine, other, tokens) <= num_shared
        wait_until(lambda: run(engine, other, tokens) == 3 * CHUNK, what="a hit of the other")
        for variant in (other, one):  # and in other pods
            wait_until(lambda which=variant: run(second, which, tokens) == 3 * CHUNK, what="a hit elsewhere")
        assert_idle(engine)
        assert_idle(second)


def test_a_client_s_name_for_two_pictures_is_theirs_alone(world: SimWorld) -> None:
    """In one engine it is not cached any more, as vLLM itself mixes them up; in two it names two contents."""
    tokens = make_tokens(LENGTH)
    cat, dog = medium("cat", identifier="my picture"), medium("dog", identifier="my picture")
    with world.engines(SimSettings(), SimSettings()) as (first, second):
        wait_until(lambda: run(first, cat, tokens) == 3 * CHUNK, what="a hit of the first")
        assert run(second, dog, tokens) <= CHUNK, "the text in front"
        wait_until(lambda: run(second, dog, tokens) == 3 * CHUNK, what="a hit of the second")
        assert run(first, dog, tokens) == run(first, cat, tokens) == 0
        assert_idle(first)
        assert_idle(second)


@pytest.mark.parametrize("runner", [1, 2])
def test_a_session_that_goes_on_neither_finds_nor_stores(world: SimWorld, runner: int) -> None:
    """Its tokens are replaced after they were hashed: the last one that was sampled is taken back."""
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
        # The prompt of the session, for another one; nothing of it is there, and then all.
        assert run_beside(engine, tokens) == 0
        wait_until(lambda: run_beside(engine, tokens) == 3 * CHUNK, what="a hit")
        engine.add(more, 20, name=name, resumable=True)
        pause()
        whole = list(engine.scheduler.requests[name].all_token_ids)
        assert whole[:LENGTH] == tokens
        assert whole[-20 - LENGTH : -20] == more
        engine.add([0], 1, name=name)  # the end of the session
        engine.run()
        assert run_beside(engine, whole) <= 3 * CHUNK, "what the other request stored"
        again = engine.add(tokens, 20, resumable=True)
        pause()
        assert engine.results[again].num_cached_tokens == 0
        engine.add([0], 1, name=again)
        engine.run()
        assert not engine.leftovers()
        assert_idle(engine)


def run_beside(engine: SimEngine, tokens: list[int]) -> int:
    """A request to its end, with its stores, while a session waits."""
    name = engine.add(tokens)
    engine.run(name)
    wait_until(lambda: not (engine.step() or engine.leftovers()), what="the end of the stores")
    return engine.results[name].num_cached_tokens


arrivals = st.tuples(
    st.integers(0, 1),  # the engine
    st.sampled_from(NAMES),
    st.integers(0, 1),  # the variant
    st.sampled_from((1, CHUNK + 8)),  # tokens of the answer
    st.integers(0, 6),  # steps until the next one comes
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(arrivals, min_size=4, max_size=14),
    st.sampled_from((1, 2)),
    st.sampled_from((64, 160)),
    st.booleans(),
)
def test_whatever_comes_together_reads_its_own(
    world: SimWorld, variants: dict[str, Any], asked: list[Any], runner: int, num_tokens: int, is_async: bool
) -> None:
    """All of one prompt, at the same time: nothing but what they are tells them apart."""
    tokens = make_tokens(LENGTH)
    shape = SimSettings(
        runner=runner, num_blocks=48, max_num_batched_tokens=num_tokens, is_async=is_async,
        has_prefix_caching=False,
    )  # fmt: skip
    with world.engines(shape, shape) as engines:
        added = []
        for number, name, which, num_answer, num_steps in asked:
            variant = variants[name][which]
            added.append(
                (engines[number], variant.add(engines[number], tokens, num_answer), variant, num_answer)
            )
            for _ in range(num_steps):
                for each in engines:
                    each.step()
        for engine in engines:
            engine.run()
            assert_idle(engine)
        for engine, request, variant, num_answer in added:
            prompt = [variant.tokens.get(place, token) for place, token in enumerate(tokens)]
            right = TokenChain(prompt, b"", variant.content)
            for _ in range(num_answer):
                right.tokens += right.continuation()
            assert engine.results[request].tokens == right.tokens[LENGTH:]
