"""The connector in ``vllm serve`` with two ranks, over HTTP: hits, metrics, and vLLM's KV events."""

from __future__ import annotations

import itertools
import json
import random
import socket

import msgspec
import pytest
import zmq
from vllm.distributed.kv_events import KVEventBatch

from testing.child_process import wait_until
from testing.engine.process import ServedEngine, connector_config
from testing.processes import SidecarProcess

pytestmark = pytest.mark.vllm

BLOCK = 32
ANSWER_SECONDS = 30.0
"""Seconds until an engine computes an unanswered request. A busy machine must not turn hits into misses."""


def make_prompt(num_tokens, seed=0):
    tokens = random.Random(f"{num_tokens} {seed}")
    return [tokens.randrange(4, 260) for _ in range(num_tokens)]


def test_two_ranks_hit_and_publish_events_over_http(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{tmp_path}/events"}
    listener = zmq.Context.instance().socket(zmq.SUB)
    listener.subscribe("")
    listener.connect(events["endpoint"])
    with (
        listener,
        SidecarProcess(memory_size="64Mi") as sidecar,
        ServedEngine(
            tmp_path / "log",
            port,
            connector_config(sidecar.socket_path, answer_seconds=ANSWER_SECONDS),
            "--tensor-parallel-size=2",
            f"--kv-events-config={json.dumps(events)}",
            environment={"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
        ) as engine,
    ):
        engine.wait_ready()
        attached = make_prompt(600, "attached")
        # The sidecar reports clients as attached before the clients themselves know.
        wait_until(lambda: num_cached(engine.complete(attached)) == 512, timeout=300)
        wait_until(lambda: engine.metrics("vllm:lmcache_")["vllm:lmcache_stored_rows_total"] >= 2 * 2)
        numbers = itertools.count()
        prompt, metrics_before, first = wait_until(
            lambda: complete_and_store(engine, make_prompt(2000, next(numbers)), 2 * 7), timeout=300
        )
        # A worker counts a row when it has sent the commit. Lookups find the row after both ranks' commits.
        sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= 2 + 7)
        second = engine.complete(prompt)
        assert (num_cached(first), num_cached(second)) == (0, 1792)
        assert second["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
        assert {client["column"] for client in sidecar.stats()["clients"]} == {0, 1}
        assert_events_cover(listener, prompt)
        metrics_after = engine.metrics("vllm:lmcache_")
        figures = {
            name.removeprefix("vllm:lmcache_"): metrics_after[name] - metrics_before[name]
            for name in metrics_after
        }
        assert figures["loads_total"] == 2, "one load for each rank"
        assert figures["failed_loads_total"] == 0
        assert figures["loaded_blocks_total"] == 2 * 1792 // BLOCK
        assert figures["stored_rows_total"] == 2 * 7
        assert figures["load_seconds_total"] > 0
        computed, loaded = times_of(sidecar, first), times_of(sidecar, second)
        assert computed["load_seconds"] == {}
        assert loaded["load_seconds"]["memory"] < loaded["first_token_seconds"]
        assert loaded["first_token_seconds"] > 0


def complete_and_store(engine, prompt, num_rows):
    """Run a prompt. Returns the prompt, the metrics before, and the answer.

    Returns None if too few rows were stored. A busy machine may store only some of the rows: blocks of an
    ended request are held for two seconds.
    """
    metrics_before = engine.metrics("vllm:lmcache_")
    answer = engine.complete(prompt)
    name = "vllm:lmcache_stored_rows_total"
    try:
        wait_until(
            lambda: engine.metrics("vllm:lmcache_")[name] >= metrics_before[name] + num_rows, timeout=10
        )
    except AssertionError:
        return None
    return prompt, metrics_before, answer


def times_of(sidecar, answer):
    """The request on the sidecar's page, once its times are known. The engine reports it after its answer."""

    def ended(_):
        requests = json.loads(sidecar.get(f"/requests?id={answer['id']}"))["requests"]
        return requests[0] if requests and requests[0]["first_token_seconds"] is not None else None

    return sidecar.wait_until(ended)


def num_cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def assert_events_cover(listener, prompt):
    """Check that vLLM's own publisher sent an event of the sidecar's memory for each chunk of the prompt."""
    listener.setsockopt(zmq.RCVTIMEO, 30_000)
    stored_events, decoder = [], msgspec.msgpack.Decoder(KVEventBatch)
    chunks = [prompt[start : start + 256] for start in range(0, 7 * 256, 256)]
    while len(stored_events) < 7:
        *_, payload = listener.recv_multipart()
        events = decoder.decode(payload).events
        stored_events += [event for event in events if event.medium == "CPU" and event.token_ids in chunks]
    parent = None
    for number, event in enumerate(stored_events):
        assert event.parent_block_hash == parent
        assert event.token_ids == chunks[number]
        assert (event.block_size, len(event.block_hashes)) == (BLOCK, 256 // BLOCK)
        parent = event.block_hashes[-1]
