"""``lmcache-sidecar explain --prompt`` with a real vLLM, a real sidecar and a real Redis."""

import json

import pytest

from testing.child_process import wait_until
from testing.engine.tiny_model import tiny_model
from testing.processes import RedisProcess, SidecarProcess
from tests.harness import sidecar_command
from tests.harness.real_engine import BLOCK, CHUNK, attached_engine, make_prompt, served_engine

pytestmark = [pytest.mark.vllm, pytest.mark.redis]


def explain(sidecar, prompt, *arguments):
    """Run the command. Returns its JSON output, or the text of its error."""
    text = prompt if isinstance(prompt, str) else json.dumps(prompt)
    words = "--prompt", "-", "--output", "json", *arguments
    status, printed = sidecar_command.explain(sidecar, *words, prompt=text.encode())
    return json.loads(printed) if status == 0 else printed


def runs(answer):
    return [(run["num_tokens"], run["place"], run["cause"]) for run in answer["runs"]]


@pytest.fixture(scope="module")
def redis():
    with RedisProcess() as redis:
        yield redis


@pytest.fixture(scope="module")
def sidecar(redis):
    with SidecarProcess(memory_size="16Mi", remote_url=redis.unix_url) as sidecar:
        yield sidecar


@pytest.fixture(scope="module")
def engine(sidecar, tmp_path_factory):
    with attached_engine(sidecar, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def store(engine, sidecar, *prompts, **options):
    """Run prompts, and wait until Redis has their chunks."""
    for prompt in prompts:
        end = sidecar.stats()["causes"]["prompt_tokens"] + len(prompt)
        written = sidecar.stats()["remote"]["written"] + len(prompt) // CHUNK
        engine.generate(prompt, max_tokens=1, **options)
        sidecar.wait_until(
            lambda stats, end=end, written=written: (
                stats["causes"]["prompt_tokens"] >= end
                and stats["remote"]["written"] >= written
                and not stats["num_unwritten_rows"]
            )
        )


def test_shows_where_the_chunks_of_a_prompt_are(engine, sidecar, redis):
    prompt = make_prompt(4 * CHUNK + 7, "places")
    new = [(4 * CHUNK, "nowhere", "new"), (7, "nowhere", "tail")]
    assert runs(explain(sidecar, prompt)) == new
    store(engine, sidecar, prompt)
    answer = explain(sidecar, prompt)
    assert runs(answer) == [(4 * CHUNK, "memory", ""), (7, "nowhere", "tail")]
    assert (answer["common_tokens"], answer["memory_tokens"]) == (4 * CHUNK, 4 * CHUNK)
    store(engine, sidecar, *(make_prompt(4 * CHUNK + 1, f"other {number}") for number in range(5)))
    answer = explain(sidecar, prompt)
    assert runs(answer) == [(4 * CHUNK, "remote", ""), (7, "nowhere", "tail")]
    assert (answer["memory_tokens"], answer["reachable_tokens"]) == (0, 4 * CHUNK)
    assert runs(explain(sidecar, make_prompt(4 * CHUNK + 7, "never sent"))) == new
    redis.client.flushall()
    assert runs(explain(sidecar, prompt)) == [(4 * CHUNK, "nowhere", "evicted"), (7, "nowhere", "tail")]


@pytest.mark.parametrize("depth", [40, CHUNK, 2 * CHUNK + 40])
def test_shows_where_a_prompt_leaves_an_earlier_one(engine, sidecar, depth):
    prompt = make_prompt(3 * CHUNK + 1, f"parting {depth}")
    store(engine, sidecar, prompt)
    other = [*prompt[:depth], *make_prompt(len(prompt) - depth, f"other end {depth}")]
    answer = explain(sidecar, other)
    num_common = depth // CHUNK * CHUNK
    common = [(num_common, "memory", "")] if num_common else []
    assert runs(answer) == [
        *common, (3 * CHUNK - num_common, "nowhere", "diverged"), (1, "nowhere", "tail"),
    ]  # fmt: skip
    assert answer["common_tokens"] == (num_common or depth // BLOCK * BLOCK)


def test_chunks_of_a_salted_prompt_are_found_with_the_salt_only(engine, sidecar):
    prompt = make_prompt(2 * CHUNK + 1, "salted")
    store(engine, sidecar, prompt, cache_salt="tenant ä")
    (first, *_) = runs(explain(sidecar, {"token_ids": prompt, "cache_salt": "tenant ä"}))
    assert first == (2 * CHUNK, "memory", "")
    for salt in ("", "tenant b"):
        (first, *_) = runs(explain(sidecar, {"token_ids": prompt, "cache_salt": salt}))
        assert first == (2 * CHUNK, "nowhere", "new")


def test_prompts_of_an_engine_whose_caches_were_reset_are_found(tmp_path):
    prompt = make_prompt(2 * CHUNK + 1, "reset")
    with SidecarProcess() as sidecar, attached_engine(sidecar, tmp_path) as engine:
        for _ in range(2):  # the engine finds nothing after the reset, and stores the prompt again
            num_rows = sidecar.stats()["memory"]["used_rows"] + 2
            engine.generate(prompt, max_tokens=1)
            sidecar.wait_until(
                lambda stats, num_rows=num_rows: (
                    stats["memory"]["used_rows"] == num_rows and not stats["num_unwritten_rows"]
                )
            )
            assert runs(explain(sidecar, prompt))[0] == (2 * CHUNK, "memory", "")
            assert engine.reset_caches()


def test_looking_at_a_prompt_uses_and_counts_nothing(engine, sidecar, redis):
    prompts = [make_prompt(2 * CHUNK + 1, f"look {number}") for number in range(12)]
    store(engine, sidecar, *prompts)  # the first ones are evicted from memory
    before, row = sidecar.stats(), redis.client.keys()[0]
    idle_seconds, hexists = redis.client.object("idletime", row), calls(redis, "hexists")
    for prompt in [*prompts, make_prompt(2 * CHUNK, "unknown")] * 3:
        explain(sidecar, prompt)
    after = sidecar.stats()
    for part in ("causes", "lookups", "memory"):
        assert after[part] == before[part]
    for counter in ("promoted", "hits", "misses"):
        assert after["remote"][counter] == before["remote"][counter]
    assert redis.client.object("idletime", row) >= idle_seconds
    assert calls(redis, "hexists") == hexists
    assert runs(explain(sidecar, prompts[0]))[0] == (2 * CHUNK, "remote", "")


def calls(redis, command):
    return redis.client.info("commandstats").get(f"cmdstat_{command}", {}).get("calls", 0)


def test_text_is_tokenised_by_the_model_on_this_machine(engine, sidecar):
    text = "A prompt in words. " * 40
    answer = explain(sidecar, text)
    assert answer["num_tokens"] == len(text)  # the tiny model has a token for each character
    store(engine, sidecar, tokens_of(text))
    assert runs(explain(sidecar, text))[0] == (2 * CHUNK, "memory", "")
    assert explain(sidecar, json.dumps({"prompt": text}), "--tokenizer", str(tiny_model())) == explain(
        sidecar, text
    )


def tokens_of(text):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_model() / "tokenizer.json")).encode(text).ids


def test_keys_of_an_unreproducible_algorithm_are_refused_with_the_remedy(tmp_path):
    with (
        SidecarProcess(memory_size="16Mi") as sidecar,
        attached_engine(sidecar, tmp_path, prefix_caching_hash_algo="sha256"),
    ):
        error = explain(sidecar, [1, 2, 3])
    assert "block hashes by sha256 can't be reproduced in other processes" in error
    assert "--prefix-caching-hash-algo sha256_cbor" in error


def test_server_tokenises_text_and_chats_whose_chunks_are_explained(tmp_path):
    with SidecarProcess() as sidecar, served_engine(sidecar, tmp_path) as engine:
        url = ("--engine-url", engine.url)
        text = "A prompt for the engine. " * 40
        answer = explain(sidecar, text, *url)
        assert runs(answer)[0][1:] == ("nowhere", "new")
        engine.complete(text)
        num_tokens = answer["num_tokens"] // CHUNK * CHUNK
        wait_until(
            lambda: runs(explain(sidecar, text, *url))[0][:2] == (num_tokens, "memory"),
            what="the chunks of the prompt",
        )
        answer = explain(sidecar, {"messages": [{"role": "user", "content": text}]}, *url)
        assert runs(answer)[0][1:] == ("nowhere", "new")
        assert answer["num_tokens"] > len(text)
