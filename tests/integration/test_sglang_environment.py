"""The real SGLang runs without a GPU, with its own storage backend, and the stand-ins for CUDA copy right."""

import json
import os
import subprocess
import sys

import pytest

from testing.child_process import REPOSITORY, wait_until
from testing.engine.process import EngineFailed
from testing.engine.tiny_kinds import DEEPSEEK2
from testing.sglang.engine import DEEPSEEK2_ARGUMENTS, PAGE_TOKENS, file_storage, make_prompt
from testing.sglang.program import Program

pytestmark = [pytest.mark.sglang, pytest.mark.rotating("file")]

PROMPT = make_prompt(2048)
REUSABLE = len(PROMPT) - PAGE_TOKENS
"""Tokens that a cache can give: SGLang always computes the last page."""


def from_tier(tier, num_tokens=REUSABLE):
    return {"device": 0, "host": 0, "storage": 0} | {tier: num_tokens}


def test_engine_reads_pages_that_another_engine_stored(start_sglang, tmp_path):
    storage = file_storage(tmp_path / "pages")
    first = start_sglang(storage)
    cold = first.generate(PROMPT)
    assert (cold.num_cached_tokens, len(cold.tokens)) == (0, 8)
    warm = first.generate(PROMPT)
    assert (warm.cached, warm.tokens) == (from_tier("device"), cold.tokens)
    first.flush_cache()
    flushed = first.generate(PROMPT)
    assert (flushed.cached, flushed.tokens) == (from_tier("storage"), cold.tokens)
    first.wait_stored(len(PROMPT))
    first.kill()

    second = start_sglang(storage)
    hit = second.generate(PROMPT)
    assert (hit.cached, hit.tokens) == (from_tier("storage"), cold.tokens)
    assert second.generate(PROMPT, cache_salt="another tenant").num_cached_tokens == 0


def test_host_tier_gives_what_the_device_evicted(start_sglang):
    engine = start_sglang(max_total_tokens=4096, hicache_ratio=4.0)
    cold = engine.generate(PROMPT)
    engine.generate(make_prompt(3000, seed="other"))
    hit = engine.generate(PROMPT)
    assert hit.cached["host"] > 0
    assert (hit.num_cached_tokens, hit.cached["storage"], hit.tokens) == (REUSABLE, 0, cold.tokens)


def test_backend_is_attached_cleared_and_detached_at_run_time(start_sglang, tmp_path):
    storage = file_storage(tmp_path / "pages")
    engine = start_sglang(environment=storage.environment)
    engine.attach(storage)
    cold = engine.generate(PROMPT)
    engine.flush_cache()
    assert engine.generate(PROMPT).cached == from_tier("storage")
    engine.clear_storage()
    engine.flush_cache()
    assert engine.generate(PROMPT).num_cached_tokens == 0
    engine.flush_cache()
    engine.detach()
    detached = engine.generate(PROMPT)
    assert (detached.num_cached_tokens, detached.tokens) == (0, cold.tokens)


def test_kill_ends_all_processes_and_their_requests(start_sglang):
    engine = start_sglang(disable_overlap_schedule=False)
    pending = engine.start_generate(make_prompt(200), max_new_tokens=4000)
    wait_until(lambda: 1.0 in engine.metrics("sglang:num_running_reqs").values())
    assert len(engine.processes()) == 3  # server, scheduler, detokenizer
    engine.kill()
    assert not engine.processes()
    with pytest.raises(EngineFailed):
        pending.wait()


def test_failed_installation_says_what_to_do(tmp_path):
    empty = {"LMCACHE_CACHE_DIR": tmp_path / "cache", "UV_CACHE_DIR": tmp_path / "packages", "UV_OFFLINE": 1}
    variables = os.environ | {name: str(value) for name, value in empty.items()}
    command = [sys.executable, "-m", "testing.sglang"]
    done = subprocess.run(command, cwd=REPOSITORY, env=variables, capture_output=True, text=True)
    assert done.returncode == 1
    assert "[sglang] SGLang cannot be installed. Check the access to the package index." in done.stderr
    assert "Traceback" not in done.stderr
    assert not list((tmp_path / "cache").glob("sglang-*/*"))


def test_failed_start_reports_the_log(start_sglang, tmp_path):
    with pytest.raises(EngineFailed, match="not-an-attention-backend"):
        start_sglang(attention_backend="not-an-attention-backend")


@pytest.mark.parametrize(
    ("arguments", "num_ranks_that_store"),
    [({}, 2), ({"model": DEEPSEEK2, **DEEPSEEK2_ARGUMENTS}, 1)],
    ids=["heads", "latents"],
)
def test_ranks_share_a_prompt(start_sglang, tmp_path, arguments, num_ranks_that_store):
    """Ranks store their heads' KV. Latents are equal on all ranks, so that one rank stores them."""
    if kind := arguments.get("model"):
        arguments = arguments | {"model": kind.path}
    storage = file_storage(tmp_path / "pages")
    first = start_sglang(storage, tp_size=2, **arguments)
    cold = first.generate(PROMPT)
    first.wait_stored(num_ranks_that_store * len(PROMPT))
    first.kill()
    hit = start_sglang(storage, tp_size=2, **arguments).generate(PROMPT)
    assert (hit.cached, hit.tokens) == (from_tier("storage"), cold.tokens)


def test_stand_ins_copy_pages_byte_by_byte(tmp_path):
    """Host pages and the device's KV are compared with copies that the test makes itself."""
    with Program("the pools", tmp_path / "log", "tests.harness.sglang_pools", []) as program:
        outcomes = json.loads(program.finish().splitlines()[-1])
    assert len(outcomes) == 8
    for case, outcome in outcomes.items():
        num_buffers = {"mha": 6, "mla": 3}[case.split()[0]]  # keys and values of three layers, or latents
        assert outcome == {
            "stored": [True] * 3,
            "loaded": [True] * num_buffers,
            "num_written_elsewhere": 0,
            "is_page_locked": False,
        }, case
