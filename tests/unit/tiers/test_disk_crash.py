"""A disk tier after its process was killed, and under many threads."""

import random
import signal
import subprocess
import sys
import threading
from itertools import chain
from pathlib import Path

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.disk.tier import DiskTier
from tests.harness.loops import in_threads
from tests.harness.tiers.disk_world import (
    MIB,
    PAGE,
    content,
    key_of,
    load,
    open_tier,
    store,
    taken_bytes,
    temporaries,
)

CAPACITY = 48 * MIB
NUM_OBJECTS = 160  # up to 256 KiB each

WRITER = """
import os, random, sys
from lmcache_store.tiers.base import ObjectId
from tests.harness.tiers.disk_world import key_of, open_tier, store

tier = open_tier(sys.argv[1], int(sys.argv[2]))
while True:
    number, size = random.randrange(160), random.randrange(256 << 10)
    os.write(1, b"? %d %d\\n" % (number, size))
    tier.remove(ObjectId(key_of(number), 0))
    assert store(tier, number, size)
    os.write(1, b"+ %d %d\\n" % (number, size))
"""


def test_acknowledged_objects_are_intact_after_a_kill(tmp_path):
    """Kill a real process at random moments while it stores and removes objects."""
    sizes: dict[int, int] = {}  # of acknowledged objects
    num_cut = 0
    for _ in range(4):
        command = [sys.executable, "-c", WRITER, str(tmp_path), str(CAPACITY)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE)
        lines = iter(child.stdout)
        first = next(lines)
        # The test varies the moment of death; nothing waits for this timer.
        threading.Timer(random.uniform(0.01, 0.1), child.kill).start()
        pending = (-1, 0)
        for line in chain([first], lines):
            kind, *words = line.split()
            number, size = map(int, words)
            if kind == b"?":
                pending = (number, size)
            else:
                sizes[number] = size
                pending = (-1, 0)
        assert child.wait() == -signal.SIGKILL
        num_cut += pending[0] >= 0
        tier = open_tier(tmp_path, CAPACITY)
        check_consistent(tier, tmp_path)
        for number in range(NUM_OBJECTS):
            loaded = load(tier, number, MIB)
            old = content(number, sizes[number]) if number in sizes else None
            assert loaded == old or (number == pending[0] and loaded in (None, content(*pending)))
            if loaded is None:
                sizes.pop(number, None)
            else:
                sizes[number] = len(loaded)
        assert tier.stats.invalid == {}
        tier.close()
    assert num_cut > 0


def test_concurrent_stores_loads_and_evictions_return_right_bytes(tmp_path):
    tier = open_tier(tmp_path, 40 * PAGE)

    def work(seed: int) -> None:
        choice = random.Random(seed)
        for _ in range(150):
            number = choice.randrange(24)
            size = number * PAGE // 4
            action = choice.random()
            if action < 0.5:
                store(tier, number, size)
            elif action < 0.9:
                assert load(tier, number) in (None, content(number, size))
            else:
                tier.remove(ObjectId(key_of(number), 0))
            assert tier.used_bytes <= 40 * PAGE
            tier.contains(ObjectId(key_of(number), 0))

    in_threads(work, range(8))
    assert tier.stats.evicted > 0
    assert tier.stats.invalid == {}
    assert tier.stats.failures == 0
    check_consistent(tier, tmp_path)
    tier.close()


def check_consistent(tier: DiskTier, path: Path) -> None:
    """Check that the index and the directory agree."""
    assert not temporaries(path)
    assert tier.used_bytes == taken_bytes(path)
    in_order = tier.keys()
    assert len(in_order) == len([file for file in path.rglob("*.0") if file.is_file()])
    assert all(tier.contains(ObjectId(key, 0)) for key in in_order)
