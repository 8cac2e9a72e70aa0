"""Time the native Redis client of lmcache 0.5.6 (its `resp` adapter) with one connection.

For each line of input, the program stores and loads all parts. It runs in that package's environment.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time

os.environ["LMCACHE_TRACK_USAGE"] = "false"

from lmcache.lmcache_redis import LMCacheRedisClient


def main() -> None:
    port, num_parts, part_bytes = map(int, sys.argv[1:])
    client = LMCacheRedisClient("127.0.0.1", port, 1)
    ready = client.event_fd()

    def run(submit: object, buffers: list[bytearray]) -> float:
        start = time.perf_counter()
        submit([f"peer:{index}" for index in range(num_parts)], [memoryview(buffer) for buffer in buffers])
        while True:
            select.select([ready], [], [])
            os.read(ready, 8)
            for done in client.drain_completions():
                if not done[1]:
                    raise SystemExit(f"the peer failed: {done}")
                return time.perf_counter() - start

    source = [bytearray(os.urandom(part_bytes)) for _ in range(num_parts)]
    target = [bytearray(part_bytes) for _ in range(num_parts)]
    for _ in sys.stdin:
        seconds = {
            "store": run(client.submit_batch_set, source),
            "load": run(client.submit_batch_get, target),
        }
        if target != source:
            raise SystemExit("the peer did not return what was stored")
        print(json.dumps(seconds), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
