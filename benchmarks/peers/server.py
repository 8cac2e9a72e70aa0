"""Time `lmcache server` of 0.5.6 with its bench client: store, look up and retrieve a prompt.

Each line of input starts one round with a new prompt.

The program runs in that package's environment. Arguments: transfer mode, tokens per prompt, KV shape (in the
package's notation), lookups per round. With ``serve`` instead, it times nothing, and answers each line with
the server's port.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

os.environ["LMCACHE_TRACK_USAGE"] = "false"  # otherwise the package sends usage data
os.environ["LMCACHE_LOG_LEVEL"] = "ERROR"

import torch
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

MODEL_BLOCKS, BLOCK_TOKENS = 1024, 16
START_SECONDS = 120


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def start_server(port: int, http_port: int) -> subprocess.Popen[bytes]:
    address = [f"--port={port}", "--host=127.0.0.1", f"--http-port={http_port}", "--http-host=127.0.0.1"]
    memory = ["--l1-size-gb=5", "--eviction-policy=LRU", "--supported-transfer-mode=auto"]
    command = [str(Path(sys.executable).parent / "lmcache"), "server", *address, *memory]
    process = subprocess.Popen(
        [*command, f"--shm-name=bench{port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{http_port}/healthcheck", timeout=2)
            return process
        time.sleep(0.2)
    process.kill()
    raise SystemExit("the peer's server did not start")


def timed_round(client: ServerBenchClient, turn: int, num_lookups: int) -> dict[str, float]:
    cold = client.create_request(turn, f"cold-{turn}", "cold")
    client.lookup(cold)
    stored = client.store(cold, 0, cold.num_full_tokens)
    client.end_session(cold)
    layer = next(iter(client._workers[0].kv_caches.values()))
    before = layer.clone()
    lookups = []
    for number in range(num_lookups):
        warm = client.create_request(turn, f"warm-{turn}-{number}", "warm")
        result = client.lookup(warm)
        if not result.is_full_hit:
            raise SystemExit(f"the peer found {result.hit_chunks} of {result.total_chunks} chunks")
        lookups.append(result.latency_ms / 1e3)
        if number + 1 < num_lookups:
            client.end_session(warm)
    client.zero_destination(warm, 0, warm.num_full_tokens)
    retrieved = client.retrieve(warm, 0, warm.num_full_tokens)
    client.end_session(warm)
    if not (stored.succeeded and retrieved.succeeded):
        raise SystemExit(f"the peer failed: {stored}, {retrieved}")
    if not torch.equal(layer, before):
        raise SystemExit("the peer did not return what was stored")
    lookups.sort()
    return {
        "store": stored.latency_ms / 1e3,
        "retrieve": retrieved.latency_ms / 1e3,
        "lookup": lookups[len(lookups) // 2],
        "lookup p99": lookups[int(len(lookups) * 0.99)],
    }


def main() -> None:
    port, http_port = free_port(), free_port()
    server = start_server(port, http_port)
    try:
        if sys.argv[1] == "serve":
            for _ in sys.stdin:
                print(json.dumps({"port": port}), flush=True)
        else:
            time_prompts(port, http_port)
    except BaseException as error:
        print(error, file=sys.stderr, flush=True)
    finally:
        server.kill()
        for process in (os.getpid(), server.pid):  # neither side removes its shared memory
            for left in Path("/dev/shm").glob(f"*lmcache*{process}_*"):
                left.unlink()
        Path(f"/dev/shm/bench{port}").unlink(missing_ok=True)
        os._exit(0)  # the package's threads never end


def time_prompts(port: int, http_port: int) -> None:
    mode, tokens, shape, num_lookups = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    config = BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{port}", http_url=f"http://127.0.0.1:{http_port}", mode="cpu",
        transfer_mode=mode, tp_size=1, use_mla=False, num_tokens=tokens, kvcache_shape_spec=shape,
        num_blocks=MODEL_BLOCKS, block_size=BLOCK_TOKENS,
    )  # fmt: skip
    client = ServerBenchClient(config, lambda line: None)
    client.start()
    for turn, _ in enumerate(sys.stdin):
        print(json.dumps(timed_round(client, turn, num_lookups)), flush=True)


if __name__ == "__main__":
    main()
