"""Compare store and load of the disk tier with a bare loop that uses the same flags; time a start.

A store of a present object only marks it as used. The benchmark compares it with a store of a new object.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.report import Figure, Report, at_least, at_most
from lmcache.tiers.base import ObjectId, StoredId
from lmcache.tiers.disk.files import path_of
from lmcache.tiers.disk.index import Index
from lmcache.tiers.disk.tier import DiskTier

ROUNDS = 40
BYTES_PER_ROUND = 64 << 20
NUM_FILES = int(os.environ.get("LMCACHE_BENCH_FILES", "100000"))
FILE_BYTES = 8192
CAPACITY = 8 << 30
TICK_SECONDS = 0.5e-3

SIZES = (4 << 20, 32 << 20)
POLICY_BYTES = 8  # per object, in pages that tracemalloc does not see

Seconds = dict[str, list[float]]
Ways = dict[str, Callable[[bytes], object]]
Transfer = Callable[[int, list[memoryview], int], int]


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a directory on the volume of TMPDIR."""
    path = Path(tempfile.mkdtemp(prefix="lmcache-bench-"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def transfers(tier: DiskTier, path: Path, size: int) -> Seconds:
    """Return seconds per object. Bare loop and tier alternate in random order, so that noise affects both."""
    payload, into = (memoryview(mmap.mmap(-1, size)) for _ in range(2))
    payload[:] = into[:] = os.urandom(size)  # otherwise the loops would populate untouched pages

    def bare(key: bytes, flags: int, transfer: Transfer, memory: memoryview) -> None:
        fd = os.open(path / key.hex()[64:], flags | os.O_DIRECT, 0o600)
        transfer(fd, [memory], 0)
        os.close(fd)

    store: Ways = {
        "bare store": lambda key: bare(key, os.O_WRONLY | os.O_CREAT, os.pwritev, payload),
        "store": lambda key: tier.store(ObjectId(key, 0), payload),
    }
    load: Ways = {
        "bare load": lambda key: bare(key, os.O_RDONLY, os.preadv, into),
        "load": lambda key: tier.load(ObjectId(key, 0), into),
    }
    again: Ways = {"present": store["store"]}
    seconds: Seconds = {what: [] for what in (*store, *again, *load)}
    for _ in range(ROUNDS):
        keys = [bytes(32) + os.urandom(32) for _ in range(BYTES_PER_ROUND // size)]
        for ways in (store, again, load):
            for key in keys:
                for what in random.sample(list(ways), len(ways)):
                    start = time.perf_counter()
                    ways[what](key)
                    seconds[what].append(time.perf_counter() - start)
        for key in keys:
            tier.remove(ObjectId(key, 0))
            (path / key.hex()[64:]).unlink()
    return seconds


def fio(path: Path, direction: str, size: int) -> float:
    """Return the bytes per second that fio measures, one object at a time."""
    files = ["--nrfiles=16", f"--filesize={size}", f"--bs={size}", "--file_service_type=sequential"]
    command = ["fio", "--name=object", f"--directory={path}", f"--rw={direction}", "--direct=1", *files]
    answer = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True).stdout
    return float(json.loads(answer)["jobs"][0][direction]["bw_bytes"])


def figures(path: Path, size: int) -> Iterator[Figure]:
    tier = DiskTier(path / "tier", CAPACITY)
    seconds = transfers(tier, path, size)
    tier.close()
    for direction, fio_direction in (("store", "write"), ("load", "read")):
        rates = [size / statistics.median(seconds[what]) / 1e9 for what in (f"bare {direction}", direction)]
        peer = f", fio {fio(path, fio_direction, size) / 1e9:.2f}" if shutil.which("fio") else ""
        what = f"{direction} {size >> 20} MiB: {rates[1]:.2f} GB/s of bare {rates[0]:.2f}{peer}"
        yield at_least(what, rates[1] / rates[0] * 100, "%", 90)
    present, new = (statistics.median(seconds[what]) for what in ("present", "store"))
    yield at_most(f"store of {size >> 20} MiB that is present, of a new store", present / new * 100, "%", 5)


def start(path: Path) -> Iterator[Figure]:
    """Index many files. At the same time, measure the stalls of another thread."""
    ids = [ObjectId(os.urandom(64), 0) for _ in range(NUM_FILES)]
    for object_id in ids:
        file = path / path_of(StoredId(ObjectId(bytes(32) + object_id.row_key[32:], 0)))
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as out:
            out.truncate(FILE_BYTES)
    begin = last = time.perf_counter()
    tier = DiskTier(path, CAPACITY)
    stall = 0.0
    while not tier.indexed.is_set():
        time.sleep(TICK_SECONDS)
        now = time.perf_counter()
        stall, last = max(stall, now - last - TICK_SECONDS), now
    took = (last - begin) * 100_000 / NUM_FILES
    assert tier.used_bytes == NUM_FILES * FILE_BYTES, "the index lacks some files"
    tier.close()
    yield at_most(f"index 100 k objects (of {NUM_FILES})", took, "s", 3)
    yield Figure("longest stall of another thread during it", stall * 1e3, "ms")
    yield Figure("index, per object", index_bytes(), "bytes")


def index_bytes() -> float:
    tracemalloc.start()
    index = Index(CAPACITY)
    for _ in range(NUM_FILES):
        slot = index.reserve(1)
        assert slot is not None
        index.commit(slot, StoredId(ObjectId(os.urandom(64), 0)))
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return allocated / NUM_FILES + POLICY_BYTES


def run() -> Report:
    with scratch() as path:
        measured = [figure for size in SIZES for figure in figures(path, size)]
    with scratch() as path:
        measured += start(path)
    return Report("disk", _conditions(), measured)


def _conditions() -> str:
    return (
        f"alternating with a bare open, O_DIRECT read or write, and close on the volume of"
        f" {tempfile.gettempdir()}; {ROUNDS} rounds of {BYTES_PER_ROUND >> 20} MiB, medians per object; the"
        f" tier also hashes, writes a header and renames; files of {FILE_BYTES} bytes for the start, warm"
    )
