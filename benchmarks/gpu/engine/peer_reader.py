"""Read all rows of a pod's memory tier again and again, as the sidecar of another pod would.

``python -m benchmarks.gpu.engine.peer_reader ARENA HOST PORT`` prints after each round the bytes that it has
read, and the seconds that this took. It reads until it is killed. The keys come from the arena's slot table.
"""

from __future__ import annotations

import itertools
import sys
import time
from pathlib import Path

import numpy as np

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.memory.layout import HEAD_BYTES, ArenaLayout, Head
from lmcache_store.tiers.memory.slots import ENTRY, SlotState
from lmcache_store.tiers.peers.peer import Peer
from lmcache_store.tiers.remote.address import DEFAULT_PREFIX, Endpoint

_TIMEOUT_SECONDS = 10.0


def committed(arena: Path) -> list[tuple[bytes, int]]:
    """Return row key and payload bytes of each committed row with one column."""
    with arena.open("rb") as file:
        head = Head.parse(file.read(HEAD_BYTES))
        if head is None or head.geometry is None:
            raise RuntimeError(f"{arena} is not formatted")
        layout = ArenaLayout.plan(head.capacity_bytes, head.geometry)
        file.seek(layout.table_offset(0))
        table = np.frombuffer(file.read(layout.num_rows * ENTRY.itemsize), ENTRY)
    table = table[table["state"] == SlotState.COMMITTED]
    return [(bytes(entry["key"]), int(entry["length"])) for entry in table]


def read(arena: Path, host: str, port: int) -> None:
    rows = committed(arena)
    peer = Peer(Endpoint(host, port), DEFAULT_PREFIX, str, _TIMEOUT_SECONDS)
    buffer = memoryview(bytearray(max(length for _, length in rows)))
    began_at, num_bytes = time.perf_counter(), 0
    for _ in itertools.count():
        for key, _ in rows:
            if (loaded := peer.load(ObjectId(key, 0), buffer, None)) is not None:
                num_bytes += loaded.length
        print(num_bytes, time.perf_counter() - began_at, flush=True)


if __name__ == "__main__":
    read(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
