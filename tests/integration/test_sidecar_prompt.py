"""Bad prompts, bad questions and missing parts of ``lmcache-sidecar explain --prompt``."""

import http.client
import json

import pytest

from lmcache.block_hashes import root_of
from lmcache.rpc.hello import BlockHashes, Role
from testing.processes import RedisProcess, SidecarProcess
from tests.harness import sidecar_command
from tests.harness.engine import session_of
from tests.harness.wire import attached, make_keys

HASHES = BlockHashes("sha256_cbor", root_of("0"), 16, True)


def explain(sidecar, prompt: bytes, *arguments: str) -> tuple[int, str]:
    """Run the command with the prompt as standard input. Returns its exit status and what it printed."""
    return sidecar_command.explain(sidecar, "--prompt", "-", *arguments, prompt=prompt)


def post(sidecar, question: object) -> tuple[int, str]:
    connection = http.client.HTTPConnection(sidecar.url.removeprefix("http://"), timeout=60)
    body = question if isinstance(question, bytes) else json.dumps(question)
    connection.request("POST", "/prompt", body)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


@pytest.fixture
def scheduler(sidecar, connect):
    return attached(connect(Role.SCHEDULER, block_hashes=HASHES, model="/missing/model"))


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"[1, 2, -3" + b", 4" * 300 + b"]", "token id -3 is not a number from 0 to"),
        (b'[1, "2"]', "token ids must be whole numbers"),
        (b'{"token_ids": "x"}', "has a field of a wrong type"),
        (b'{"token_ids": [1], "prompt": "x"}', "has no prompt, or several"),
        (b'{"token_ids": [1], "salt": "x"}', "has the unknown field 'salt'"),
        (b'{"token_ids": [1], "lora_name": "x"}', "use --request-id"),
        (b'{"messages": [{"role": "user"}]}', "only the engine knows the chat template"),
        (b"plain text", "no tokenizer of '/missing/model' is on this machine"),
        (b"[" * 100_000, "no tokenizer of '/missing/model' is on this machine"),
    ],
)
def test_a_bad_prompt_is_refused_with_what_to_do(sidecar, scheduler, prompt, sentence):
    status, text = explain(sidecar, prompt)
    assert (status, len(text.splitlines())) == (1, 1)
    assert sentence in text


def test_a_missing_file_and_a_missing_tokenizer_are_named(sidecar, scheduler, tmp_path):
    status, text = explain(sidecar, b"", "--prompt", str(tmp_path / "missing"))
    assert (status, "No such file or directory" in text) == (1, True)
    status, text = explain(sidecar, b"text", "--tokenizer", str(tmp_path))
    assert (status, f"--tokenizer: there is no {tmp_path}/tokenizer.json" in text) == (1, True)
    (tmp_path / "tokenizer.json").write_text("{}")
    status, text = explain(sidecar, b"text", "--tokenizer", str(tmp_path))
    assert (status, f"{tmp_path}/tokenizer.json is not a tokenizer" in text) == (1, True)
    status, text = explain(sidecar, b"text", "--engine-url", "http://127.0.0.1:9")
    assert (status, "no engine answers at http://127.0.0.1:9" in text) == (1, True)


def test_a_prompt_of_ten_megabytes_is_refused(sidecar, scheduler):
    status, text = explain(sidecar, b"x" * (10 << 20))
    assert (status, "has more than 4 MiB" in text) == (1, True)


def test_the_longest_prompt_is_answered_in_many_questions(sidecar, scheduler):
    tokens = [number % 7 for number in range(1_300_000)]
    status, text = explain(sidecar, json.dumps(tokens).encode(), "--output", "json")
    assert status == 0, text
    assert json.loads(text)["runs"] == [
        {"first_token": 0, "num_tokens": 1_299_968, "place": "nowhere", "cause": "new"},
        {"first_token": 1_299_968, "num_tokens": 32, "place": "nowhere", "cause": "tail"},
    ]


def test_without_an_engine_or_its_hashes_the_command_says_so(sidecar, connect):
    status, text = explain(sidecar, b"[1]")
    assert (status, "no engine is attached to the sidecar" in text) == (1, True)
    attached(connect(Role.SCHEDULER))
    status, text = explain(sidecar, b"[1]")
    assert (status, "does not say how it hashes prompts: upgrade it" in text) == (1, True)
    attached(connect(Role.SCHEDULER, engine_uuid=b"f" * 16, namespace=b"o" * 32, model="other"))
    status, text = explain(sidecar, b"[1]")
    assert (status, "with the models 'other', 'tiny': choose one with --model" in text) == (1, True)
    status, text = explain(sidecar, b"[1]", "--model", "third")
    assert (status, "no engine with the model 'third' is attached" in text) == (1, True)


@pytest.mark.parametrize(
    ("question", "sentence"),
    [
        (b"{", "Expecting"),
        (b"[]", "must be a JSON object"),
        (b"[" * 100_000, "nested too deeply"),
        ({"engine": "00"}, "no engine of this id is attached"),
        ({"engine": "65" * 16}, "keys must be a list of 1 texts"),
        ({"engine": "65" * 16, "keys": [""]}, "at most 512 in all"),
        ({"engine": "65" * 16, "keys": ["00" * 64 * 513]}, "at most 512 in all"),
        ({"engine": "65" * 16, "keys": ["00" * 63]}, "keys must be hexadecimal digits, 128 for each"),
        ({"engine": "65" * 16, "keys": ["zz" * 64]}, "non-hexadecimal number"),
        ({"engine": "65" * 16, "keys": [5]}, "keys must be hexadecimal digits"),
        ({"engine": "65" * 16, "keys": ["00" * 64], "first_blocks": "00" * 8 * 64}, "at most 63 blocks"),
    ],
)
def test_a_malformed_question_is_refused(sidecar, scheduler, question, sentence):
    status, text = post(sidecar, question)
    assert status == 400
    assert sentence in text


@pytest.mark.redis
def test_a_frozen_or_forbidden_redis_is_unknown_and_not_nowhere():
    question = {"engine": "65" * 16, "keys": [make_keys(1).hex()]}
    with (
        RedisProcess() as redis,
        SidecarProcess(remote_url=redis.unix_url) as sidecar,
        session_of(sidecar, role=Role.SCHEDULER, block_hashes=HASHES),
    ):
        assert json.loads(post(sidecar, question)[1])["places"] == ["-"]
        redis.client.execute_command("ACL", "SETUSER", "default", "-exists")
        assert json.loads(post(sidecar, question)[1])["places"] == ["?"]
        redis.client.execute_command("ACL", "SETUSER", "default", "+exists")
        redis.freeze()
        assert json.loads(post(sidecar, question)[1])["places"] == ["?"]
        redis.thaw()
