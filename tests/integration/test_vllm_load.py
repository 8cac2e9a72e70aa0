"""Real engines under load on one sidecar: answers are right, and queued requests still hit.

The engines share a sidecar with a disk. ``busy`` runs two requests at a time. ``drafting`` speculates.
"""

import itertools

import pytest

from testing.processes import SidecarProcess
from tests.harness.client import real_engine
from tests.harness.client.real_engine import (
    BLOCK,
    CHUNK,
    attached_engine,
    restart_with_empty_arena,
)

pytestmark = pytest.mark.vllm

SALTS = map("salt {}".format, itertools.count())
SEEDS = map("load {}".format, itertools.count())
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def make_prompt(num_tokens):
    return real_engine.make_prompt(num_tokens, next(SEEDS))


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory):
    disk = tmp_path_factory.mktemp("disk")
    with SidecarProcess(memory_size="256Mi", disk_path=disk, disk_size="1Gi") as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def busy(sidecar, tmp_path_factory):
    with attached_engine(sidecar, tmp_path_factory.mktemp("busy"), max_num_seqs=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafting(sidecar, tmp_path_factory):
    options = {"speculative_config": DRAFTS, "enable_prefix_caching": True, "max_num_batched_tokens": 512}
    with attached_engine(sidecar, tmp_path_factory.mktemp("drafting"), **options) as engine:
        yield engine


def cold(engine, *prompts, **options):
    """Run without hits: nothing is stored under the new salt, and KV does not depend on the salt."""
    return [engine.generate(prompt, cache_salt=next(SALTS), **options)[0] for prompt in prompts]


def assert_same(answers, references):
    for answer, reference in zip(answers, references, strict=True):
        assert answer.tokens == reference.tokens
        assert answer.finish_reason == "length"


def assert_loaded(hits, stored):
    """Check that loaded KV equals the KV of the request that stored it."""
    for hit, computed in zip(hits, stored, strict=True):
        end = hit.num_cached_tokens // CHUNK * CHUNK // BLOCK
        for layer, (loaded, expected) in enumerate(zip(hit.kv, computed.kv, strict=True)):
            assert loaded[:end] == expected[:end], f"layer {layer}"


def test_queued_requests_hit_like_those_of_an_idle_engine(busy, sidecar):
    """Two requests run at a time. Most wait long after their lookup, and their chunks come from the disk."""
    prompts = [make_prompt(2 * CHUNK + 50) for _ in range(10)]
    num_rows = sidecar.stats()["memory"]["used_rows"] + 2 * len(prompts)
    stored = busy.generate(*prompts)
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= num_rows)
    restart_with_empty_arena(busy, sidecar)
    hits = busy.generate(*prompts)
    assert_same(hits, stored)
    assert_loaded(hits, stored)
    assert [hit.num_cached_tokens for hit in hits] == [2 * CHUNK] * len(prompts)


def test_queued_requests_hit_chunks_stored_while_they_wait(busy):
    """Nothing is cached when the requests arrive. The first one's chunks are stored before the others run."""
    prefix = make_prompt(2 * CHUNK)
    prompts = [prefix + make_prompt(40) for _ in range(8)]
    references = cold(busy, *prompts)
    answers = busy.generate(*prompts)
    assert_same(answers, references)
    assert sum(answer.num_cached_tokens == 2 * CHUNK for answer in answers) >= 6


def test_engines_with_and_without_speculation_share_chunks(busy, drafting):
    """Each engine loads what the other stored, including chunks of answers.

    Only loaded blocks are compared: two engines compute the same tokens in batches of different shapes, and
    on some processors that changes the last bits of KV. The loading engine therefore drops its own KV before
    each comparison.
    """
    prompts = [make_prompt(CHUNK + 60) * 2 for _ in range(2)]
    for stores, loads in ((drafting, busy), (busy, drafting)):
        references = cold(loads, *prompts, max_tokens=1)
        turns = stores.generate(*prompts, max_tokens=200)
        following = [
            prompt + turn.tokens + make_prompt(20) for prompt, turn in zip(prompts, turns, strict=True)
        ]
        loads.scrub_kv()
        hits = loads.generate(*prompts, max_tokens=1)
        assert_same(hits, references)
        assert_loaded(hits, turns)
        loads.scrub_kv()
        nexts = loads.generate(*following, max_tokens=1)
        assert_loaded(nexts, turns)
        assert {hit.num_cached_tokens for hit in nexts} == {3 * CHUNK}
        prompts = [make_prompt(CHUNK + 60) * 2 for _ in range(2)]
