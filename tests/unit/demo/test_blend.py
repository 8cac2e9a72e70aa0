"""Blending in the demo: the prompt that is measured, and what is printed of its answers."""

import io
import json
import urllib.request
from types import SimpleNamespace

import pytest

from demo import __main__ as demo
from demo import blend, show
from demo.blend import Answer, Prompt, ask
from demo.engine import Running
from demo.engines import KINDS

PROMPT = Prompt(([5, 6], [7]), [8], "salt")
COUNTS = {"tokens": 2, "recomputed": 1, "cached": 0}
RUNNING = Running(SimpleNamespace(url="http://engine"), None, 256)
BLENDED = Answer(0.25, 8266, {"tokens": 6964, "recomputed": 1228, "cached": 0})
ROUNDS = {"cold": Answer(1.0, 0, None), "prefix cached": Answer(0.875, 2048, None), "blended": BLENDED}


@pytest.fixture
def server(monkeypatch):
    """A server that answers with ``content``, and notes the bodies of requests."""
    server = SimpleNamespace(bodies=[], content={"usage": {}})

    def answer(request, timeout):
        server.bodies.append(json.loads(request.data))
        return io.BytesIO(json.dumps(server.content).encode())

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    return server


def test_all_documents_but_the_first_are_whole_rows_at_other_places():
    """Otherwise the demo would wait for the wrong number of rows, and prefix caching would find none."""
    prompt = blend.prompt()
    assert sorted(blend.ORDER) == list(range(len(blend.DOCUMENTS)))
    assert list(blend.ORDER) != sorted(blend.ORDER)
    assert prompt.blend == {"blend": {"documents": [blend.DOCUMENT_TOKENS] * 4}}
    assert len({tuple(document) for document in prompt.documents}) == len(prompt.documents)
    assert len(prompt.tokens) == 4 * blend.DOCUMENT_TOKENS + len(blend.QUESTION)
    assert blend.DOCUMENT_TOKENS % KINDS["vllm"].chunk_tokens == 0


def test_requests_carry_parameters_and_salt(server):
    server.content = {
        "usage": {"prompt_tokens_details": {"cached_tokens": 3}},
        "kv_transfer_params": {"lmcache": {"blended": COUNTS}},
    }
    answer = ask(RUNNING, PROMPT, **PROMPT.blend)
    assert (answer.num_cached_tokens, answer.blended) == (3, COUNTS)
    (body,) = server.bodies
    assert body["kv_transfer_params"] == {"lmcache": {"blend": {"documents": [2, 1]}}}
    assert (body["prompt"], body["max_tokens"], body["cache_salt"]) == ([5, 6, 7, 8], 1, "salt")


def test_exact_answer_to_a_blended_prompt_is_no_result(server):
    assert ask(RUNNING, PROMPT) == Answer(pytest.approx(0, abs=60), 0, None)
    assert "kv_transfer_params" not in server.bodies[0]
    with pytest.raises(RuntimeError, match=r"did not blend.*engine-3\.log"):
        ask(RUNNING, PROMPT, **PROMPT.blend)


def test_documents_are_stored_before_the_next_request(server):
    """Rows arrive later than the answer. A stale count would end the wait too early."""
    memory = {"used_rows": 5}
    stats = {"memory": memory, "num_unwritten_rows": 0}
    waits = []

    def wait_until(predicate):
        assert not predicate(stats)
        memory["used_rows"] += 1
        assert not predicate(stats | {"num_unwritten_rows": 1})
        assert predicate(stats)
        waits.append(len(server.bodies))

    sidecar = SimpleNamespace(stats=lambda: stats, wait_until=wait_until)
    documents = [1] * 256, [2] * 256
    blend.announce(Running(RUNNING.engine, sidecar, 256), Prompt(documents, [8], "salt"))
    assert waits == [1, 2]
    assert [body["prompt"] for body in server.bodies] == list(documents)
    assert {json.dumps(body["kv_transfer_params"]) for body in server.bodies} == {
        '{"lmcache": {"document": true}}'
    }


def test_fastest_answer_of_each_way_is_the_result():
    slow = {name: Answer(answer.ttft_seconds * 2, 0, None) for name, answer in ROUNDS.items()}
    mixed = slow | {"cold": ROUNDS["cold"]}
    assert blend.fastest([mixed, ROUNDS | {"cold": slow["cold"]}]) == ROUNDS


def test_results_count_tokens_of_blended_prompts():
    assert demo.rows({"blend": blend.report(ROUNDS)}) == [
        ("time to first token, documents, cold", "1000.0 ms, 100.0% of cold, 0 tokens cached"),
        ("time to first token, documents, prefix cached", "875.0 ms, 87.5% of cold, 2048 tokens cached"),
        (
            "time to first token, documents, blended",
            "250.0 ms, 25.0% of cold, 6964 tokens reused, 1228 recomputed",
        ),
    ]
    assert [answer.describe(8267) for answer in ROUNDS.values()] == [
        "first token after 1000 ms, 0 of 8,267 prompt tokens from the cache",
        "first token after 875 ms, 2,048 of 8,267 prompt tokens from the cache",
        "first token after 250 ms, KV of 6,964 tokens reused, 1,228 computed again",
    ]


def test_only_parts_that_run_have_numbers(capsys):
    for name in ("first", "second"):
        show.part(name)
    titles = [line for line in capsys.readouterr().out.splitlines() if line[:1].isdigit()]
    first, second = (title.split(". ") for title in titles)
    assert (first[1], second[1]) == ("first", "second")
    assert int(second[0]) == int(first[0]) + 1
