"""CacheBlend in a real vLLM with a real sidecar: documents are reused at any position of a prompt.

The checks compare KV by numbers, because answers of a tiny model prove little. Layer 0 is the sharpest one:
its K and V depend on the token and its position alone, so they are exact wherever they were computed.
"""

import json

import pytest
import torch
from tokenizers import Tokenizer

from lmcache_client.blend.selection import NAMES
from testing import workers
from testing.child_process import wait_until
from testing.engine.process import patient_config
from testing.engine.tiny_model import tiny_model
from testing.processes import SidecarProcess
from tests.harness.client.blended import (
    DOCUMENT,
    SYSTEM_TOKENS,
    Prompt,
    announce,
    blended,
    differences,
    kv_of,
    make_tokens,
    num_known,
    num_rows,
    saved_kv,
)
from tests.harness.client.real_engine import (
    BLOCK,
    CHUNK,
    attached_engine,
    cold,
    restart_with_empty_arena,
)

pytestmark = [pytest.mark.vllm, pytest.mark.redis]

SLICE = 256
"""Tokens of a step, so that most prompts are blended in several slices."""
SEPARATOR = "\n###\n"


@pytest.fixture(scope="module")
def sidecar(shared_redis):
    with SidecarProcess(memory_size="512Mi", remote_url=shared_redis.unix_url) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    config = patient_config(sidecar.socket_path, blend="request", blend_separator=SEPARATOR)
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": SLICE}
    with attached_engine(sidecar, tmp_path_factory.mktemp("engine"), config, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def documents(engine, sidecar):
    """Documents of 1,000 and fewer tokens, whose last blocks are not full."""
    documents = [make_tokens(num_tokens) for num_tokens in (1000, 700, 333)]
    announce(engine, sidecar, *documents)
    return documents


def test_recomputing_all_tokens_is_a_full_prefill(engine, documents, tmp_path):
    prompt = Prompt.of(*reversed(documents))
    with saved_kv(engine, tmp_path):
        (full,) = cold(engine, prompt.tokens)
        answer = prompt.ask(engine, "all")
    assert blended(answer) == {"tokens": 0, "recomputed": prompt.num_known, "cached": 0}
    assert max(differences(kv_of(answer, tmp_path), kv_of(full, tmp_path))) <= 1e-4
    assert answer.tokens == full.tokens
    assert answer.logprobs == pytest.approx(full.logprobs, abs=1e-4)


def test_reused_kv_is_that_of_the_document_at_its_new_position(engine, sidecar, documents, tmp_path):
    """Two documents start within a block, and one at a block, so that its V can be compared by bytes."""
    document = make_tokens(500)
    (alone,) = announce(engine, sidecar, document)
    prompt = Prompt.of(document, documents[2], documents[0], system_tokens=2 * BLOCK)
    with saved_kv(engine, tmp_path):
        (full,) = cold(engine, prompt.tokens)
        (alone,) = cold(engine, document)
        answer = prompt.ask(engine)
    assert blended(answer) == {"tokens": prompt.num_known, "recomputed": 0, "cached": 0}
    kv, expected, stored = (kv_of(each, tmp_path) for each in (answer, full, alone))
    first, *later = differences(kv, expected)
    assert first <= 1e-4
    assert min(later[1:]) > 1e-2, "reused KV does not depend on the text before it"
    num_blocks = num_known(500) // BLOCK
    for layer, original in zip(kv, stored, strict=True):
        is_equal = layer[2 : 2 + num_blocks] == original[:num_blocks]
        assert is_equal.flatten(1).float().mean(1).min() >= 0.5, "V is half of a block, and is not rotated"
    # The system prompt was computed as always, and K was turned.
    system, expected_system = ([layer[:2] for layer in each] for each in (kv, expected))
    assert max(differences(system, expected_system)) <= 1e-4
    assert not any(torch.equal(layer[2], original[0]) for layer, original in zip(kv, stored, strict=True))


def test_document_at_the_start_of_a_prompt_is_exact(engine, documents, tmp_path):
    prompt = Prompt.of(*documents[:2], system_tokens=0)
    with saved_kv(engine, tmp_path):
        (full,) = cold(engine, prompt.tokens)
        answer = prompt.ask(engine, "none")
    assert blended(answer)["recomputed"] == 0
    num_blocks = num_known(1000) // BLOCK
    kv, expected = ([layer[:num_blocks] for layer in kv_of(each, tmp_path)] for each in (answer, full))
    assert max(differences(kv, expected)) <= 1e-4


def test_documents_of_a_computed_prompt_are_reused_in_another_order(engine, sidecar, tmp_path):
    """No document was announced. Their KV depends on the other documents, so no exact answer uses it."""
    documents = [make_tokens(num_tokens) for num_tokens in (500, 333, 700)]
    first, second = Prompt.of(*documents), Prompt.of(*reversed(documents))
    at_start = Prompt.of(*documents[1:], system_tokens=0)
    num_rows_before = sidecar.settled()["memory"]["used_rows"]
    answer = first.ask(engine)
    assert not blended(answer)
    num_taken = sum(num_rows(len(document)) for document in documents)
    expected = num_rows_before + len(first.tokens) // CHUNK + num_taken
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= expected)
    engine.scrub_kv()
    assert not blended(first.ask(engine)), "all of the prompt is known exactly"
    assert sidecar.settled()["memory"]["used_rows"] == expected, "documents are stored once"
    engine.scrub_kv()
    exact = cold(engine, *documents)
    with saved_kv(engine, tmp_path):
        fulls = cold(engine, second.tokens, at_start.tokens)
        for prompt, full in zip((second, at_start), fulls, strict=True):
            reused, computed = (prompt.ask(engine, selection) for selection in ("none", "all"))
            assert blended(reused) == {"tokens": prompt.num_known, "recomputed": 0, "cached": 0}
            assert blended(computed) == {"tokens": 0, "recomputed": prompt.num_known, "cached": 0}
            assert max(differences(kv_of(computed, tmp_path), kv_of(full, tmp_path))) <= 1e-4
            first_layer, *later = differences(kv_of(reused, tmp_path), kv_of(full, tmp_path))
            assert first_layer <= 1e-4
            assert min(later[1:]) > 1e-2, "reused KV is not that of this prompt"
    engine.scrub_kv()
    for document, alone in zip(documents, exact, strict=True):
        (again,) = engine.generate(document)
        assert (again.num_cached_tokens, again.tokens) == (0, alone.tokens)


def test_blended_kv_never_enters_exact_answers(engine, sidecar, documents):
    """Also not by the sidecar, and not in other settings or for another tenant."""
    prompt = Prompt.of(documents[1], documents[0])
    (full,) = cold(engine, prompt.tokens)
    rows_before = sidecar.settled()["memory"]["used_rows"]
    # The answer ends the chunk in which the prompt ends.
    answer = prompt.ask(engine, "attended", max_tokens=CHUNK)
    assert blended(answer)["cached"] == 0
    assert sidecar.settled()["memory"]["used_rows"] == rows_before, "blended KV was stored"

    again = prompt.ask(engine, "attended")
    assert again.tokens == answer.tokens[:8]
    assert blended(again)["cached"] >= prompt.num_known
    for setting in ({"selection": "none"}, {"selection": "attended", "ratio": 0.5}):
        other = prompt.ask(engine, **setting)
        assert blended(other)["cached"] == 0, setting
        assert blended(other)["tokens"] + blended(other)["recomputed"] == prompt.num_known, setting
    foreign = prompt.ask(engine, "attended", cache_salt="another tenant")
    assert not blended(foreign)
    assert foreign.num_cached_tokens == 0

    (exact,) = engine.generate(prompt.tokens)
    assert exact.num_cached_tokens == 0
    for result in (exact, foreign):
        assert result.tokens == full.tokens
        assert result.logprobs == pytest.approx(full.logprobs, abs=1e-4)


def test_documents_between_separators_are_reused_and_the_separators_computed(engine, documents, tmp_path):
    mark = Tokenizer.from_file(str(tiny_model() / "tokenizer.json")).encode(SEPARATOR).ids
    prompt = Prompt.of(documents[1], documents[2])
    tokens = [*prompt.system]
    for part in (*prompt.documents, prompt.question):
        tokens += [*mark, *part]
    blends = [{"lmcache": {"blend": {"separator": True, "selection": name}}} for name in ("none", "all")]
    with saved_kv(engine, tmp_path):
        (full,) = cold(engine, tokens)
        reusing, computing = engine.run(
            [{"prompt": tokens, "max_tokens": 8, "kv_transfer_params": blend} for blend in blends]
        )
    assert blended(reusing) == {"tokens": prompt.num_known, "recomputed": 0, "cached": 0}
    assert blended(computing) == {"tokens": 0, "recomputed": prompt.num_known, "cached": 0}
    assert max(differences(kv_of(computing, tmp_path), kv_of(full, tmp_path))) <= 1e-4
    assert differences(kv_of(reusing, tmp_path), kv_of(full, tmp_path))[0] <= 1e-4


@pytest.mark.parametrize(
    ("system_tokens", "num_exact"),
    [(SYSTEM_TOKENS, 0), (0, 3 * CHUNK)],
    ids=["none is exact", "a prefix is exact"],
)
def test_explain_names_the_tokens_that_the_answer_names(engine, sidecar, documents, system_tokens, num_exact):
    prompt = Prompt.of(documents[0], documents[2], system_tokens=system_tokens)
    before, num_tokens = sidecar.settled()["causes"]["prompt_tokens"], len(prompt.tokens)
    answer = prompt.ask(engine, "attended", ratio=0.25)
    counts = blended(answer)
    assert counts is not None
    assert min(counts["tokens"] - num_exact, counts["recomputed"]) > 0
    sidecar.wait_until(lambda stats: stats["causes"]["prompt_tokens"] >= before + num_tokens)
    (explained, *_) = json.loads(sidecar.get("/requests"))["requests"]
    known = {"blended": counts["tokens"] - num_exact, "recomputed": counts["recomputed"], "memory": num_exact}
    end_of_chunks = max(prompt.num_known, num_tokens // CHUNK * CHUNK)
    computed = {"new": end_of_chunks - prompt.num_known, "tail": num_tokens - end_of_chunks}
    assert explained["tokens"] == {cause: number for cause, number in (known | computed).items() if number}
    assert explained["load_seconds"].keys() == {"blended"}


def test_requests_of_all_kinds_share_steps(engine, documents):
    """Each answer equals the answer of the same request alone."""
    first = Prompt.of(documents[1], documents[2])
    second = Prompt.of(documents[2], documents[1])
    hit = documents[0] + make_tokens(30)
    requests = [
        {"prompt": make_tokens(100), "max_tokens": 60, "cache_salt": "decoding"},
        *(first.request(name, ratio=0.3) for name in NAMES),
        {"prompt": second.tokens, "max_tokens": 8, "cache_salt": "cold"},
        second.request("attended", max_tokens=20, first_step=4),
        {"prompt": hit, "max_tokens": 8, "first_step": 3},
    ]
    alone = []
    for request in requests:
        engine.scrub_kv()
        alone += engine.run([request | {"first_step": 1}])
    assert [bool(blended(answer)) for answer in alone] == [False, *[True] * 5, False, True, False]
    engine.scrub_kv()
    for result, expected in zip(engine.run(requests), alone, strict=True):
        assert result.tokens == expected.tokens
        assert blended(result) == blended(expected)


def wait_found(engine, *documents):
    """Wait until an engine finds documents that another one announced. It asks its sidecar now and then."""

    def is_found():
        (answer,) = engine.run([Prompt.of(*documents).unmarked(max_tokens=1)])
        return blended(answer).get("documents") == len(documents)

    wait_until(is_found, what="the engine finds the documents")


def check_exact(engine, exact, request):
    """A request is answered as by an engine that does not blend it, bit by bit."""
    (answer,), (full,) = engine.run([request]), cold(exact, request["prompt"])
    assert (blended(answer), answer.num_cached_tokens) == ({}, 0)
    assert (answer.kv, answer.tokens, answer.logprobs) == (full.kv, full.tokens, full.logprobs)


def check_found(engine, documents, exact):
    """Only this tenant's documents are found. Other answers are those of the ``exact`` engine, bit by bit."""
    prompt, unknown = Prompt.of(*documents), Prompt.of(make_tokens(CHUNK))
    check_exact(engine, exact, prompt.unmarked(cache_salt="a tenant without documents"))
    check_exact(engine, exact, unknown.unmarked())
    (answer,) = engine.run([prompt.unmarked()])
    counts = blended(answer)
    assert counts["tokens"] + counts["recomputed"] == prompt.num_known
    assert min(counts["tokens"], counts["recomputed"]) > 0
    assert (counts["cached"], counts["documents"]) == (0, len(documents))


def test_unmarked_documents_are_found(engine, documents, tmp_path):
    prompt = Prompt.of(documents[2], documents[1])
    with saved_kv(engine, tmp_path):
        marked = prompt.ask(engine, "all")
        engine.scrub_kv()
        parameters = {"lmcache": {"blend": {"selection": "all"}}}
        (answer,) = engine.run([prompt.request() | {"kv_transfer_params": parameters}])
    assert blended(answer) == blended(marked) | {"documents": 2}
    assert max(differences(kv_of(answer, tmp_path), kv_of(marked, tmp_path))) <= 1e-4
    assert answer.tokens == marked.tokens


def test_engine_of_another_pod_finds_documents_in_redis(engine, documents, shared_redis, tmp_path):
    """Requests of that engine need not ask."""
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": SLICE}
    tiers = {"memory_size": "256Mi", "remote_url": shared_redis.unix_url}
    with shared_redis.client as redis, SidecarProcess(**tiers) as other_sidecar:
        config = patient_config(other_sidecar.socket_path, blend="auto")
        with attached_engine(other_sidecar, tmp_path, config, **options) as other:
            wait_until(
                lambda: any(redis.zcard(key) >= len(documents) for key in redis.scan_iter("*:documents")),
                what="the marks are in Redis",
            )
            wait_found(other, *documents[1:])
            check_found(other, documents[1:], engine)
            refusing = Prompt.of(*documents[1:]).request()
            check_exact(other, engine, refusing | {"kv_transfer_params": {"lmcache": {"blend": False}}})
            (answer,) = other.generate(Prompt.of(*documents[1:]).tokens)
    assert blended(answer)["documents"] == 2


@pytest.mark.parametrize(
    ("settings", "options"),
    [({}, {}), ({"blend": "request"}, {"enable_lora": True, "max_lora_rank": 8})],
    ids=["off", "refused"],
)
def test_engine_that_does_not_blend_answers_exactly(engine, tmp_path, settings, options):
    """Requests that ask, or announce a document, get the KV and rows of any other request, byte for byte."""
    prompt = Prompt.of(make_tokens(CHUNK + BLOCK), make_tokens(CHUNK + BLOCK))
    options = {"enable_prefix_caching": True, "max_num_batched_tokens": SLICE} | options
    with SidecarProcess() as sidecar:
        config = patient_config(sidecar.socket_path, **settings)
        with attached_engine(sidecar, tmp_path, config, **options) as other:
            num_rows_before = sidecar.settled()["memory"]["used_rows"]
            other.generate(*prompt.documents, max_tokens=1, kv_transfer_params=DOCUMENT)
            assert sidecar.settled()["memory"]["used_rows"] == num_rows_before + 2, "no rows but chunks"
            (plain,), (asking,) = cold(other, prompt.tokens), other.run([prompt.request()])
            warnings = [line for line in other.log.splitlines() if "WARN" in line and "blend" in line.lower()]
    assert (asking.num_cached_tokens, blended(asking)) == (0, {})
    assert (asking.kv, asking.tokens, asking.logprobs) == (plain.kv, plain.tokens, plain.logprobs)
    if settings:
        assert len(warnings) == 1
        assert "--enable-lora" in warnings[0], "the remedy"
    else:
        assert not warnings
        (unasked,) = cold(engine, prompt.tokens)
        assert (unasked.kv, unasked.tokens) == (plain.kv, plain.tokens), "the engine that blends on request"


def test_two_ranks_blend_documents_of_a_tenant_from_lower_tiers(tmp_path, shared_redis):
    tiers = {"disk_path": tmp_path / "disk", "disk_size": "1Gi", "remote_url": shared_redis.unix_url}
    options = {
        "tensor_parallel_size": 2,
        "enable_prefix_caching": True,
        "max_num_batched_tokens": SLICE,
        "environment": {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, workers.cores(2)))},
    }
    documents = make_tokens(500), make_tokens(333)
    prompt = Prompt.of(*documents)
    with SidecarProcess(memory_size="256Mi", **tiers) as sidecar:
        config = patient_config(sidecar.socket_path, blend="request")
        with attached_engine(sidecar, tmp_path, config, **options) as engine, saved_kv(engine, tmp_path):
            announce(engine, sidecar, *documents, cache_salt="tenant")
            (full,) = cold(engine, prompt.tokens)
            for tier in ("disk", "remote"):
                sidecar.options["disk_path"] = tmp_path / tier
                restart_with_empty_arena(engine, sidecar)
                engine.scrub_kv()
                reused = prompt.ask(engine, cache_salt="tenant")
                answer = prompt.ask(engine, "all", cache_salt="tenant")
                assert sidecar.stats()[tier]["promoted"] >= sum(num_rows(len(each)) for each in documents)
                assert blended(reused) == {"tokens": prompt.num_known, "recomputed": 0, "cached": 0}
                assert blended(answer) == {"tokens": 0, "recomputed": prompt.num_known, "cached": 0}
                assert max(differences(kv_of(answer, tmp_path), kv_of(full, tmp_path))) <= 1e-4
                assert answer.tokens == full.tokens
                assert not blended(prompt.ask(engine, cache_salt=f"another tenant {tier}"))
            # Its documents were taken out of its prompt.
            sidecar.settled()
            moved = Prompt.of(*reversed(documents))
            (full,) = cold(engine, moved.tokens)
            for selection in ("none", "all"):
                answer = moved.ask(engine, selection, cache_salt=f"another tenant {tier}")
                counts = blended(answer)
                assert counts["tokens"] + counts["recomputed"] == moved.num_known
                layers = differences(kv_of(answer, tmp_path), kv_of(full, tmp_path))
                assert max(layers if selection == "all" else layers[::4]) <= 1e-4
