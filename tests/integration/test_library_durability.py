"""Chunks that were acknowledged survive SIGKILL and SIGTERM of their process."""

import signal
import subprocess
import sys

import pytest
import torch

from lmcache.config import LMCacheMemPoolMetadata
from lmcache.storage_backend.local_backend import LMCLocalDiskBackend
from tests.harness.library.kv_cache import make_chunk, make_config, make_key, make_metadata

NUM_CHUNKS = 12

PRELUDE = """
import signal, sys, time
from tests.integration.test_library_durability import *
backend = open_backend(sys.argv[1])
"""
PUT_BLOCKING = """
for index in range(NUM_CHUNKS):
    backend.put(make_key(str(index)), make_chunk(seed=index))
print("acknowledged", flush=True)
for index in range(NUM_CHUNKS, 10_000):
    backend.put(make_key(str(index)), make_chunk(seed=index))
"""
PUT_NONBLOCKING = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
put = backend.put_blocking
backend.put_blocking = lambda *chunk: time.sleep(0.05) or put(*chunk)
for index in range(NUM_CHUNKS):
    backend.put(make_key(str(index)), make_chunk(seed=index), blocking=False)
print("acknowledged", flush=True)
while True:
    time.sleep(1)
"""


def open_backend(directory: str) -> LMCLocalDiskBackend:
    pool = LMCacheMemPoolMetadata(make_metadata().kv_shape, torch.float16, 1)
    return LMCLocalDiskBackend(make_config(directory), pool, "cpu")


def run_until_acknowledged(script: str, directory: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", PRELUDE + script, directory], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"acknowledged\n"
    return process


@pytest.mark.parametrize(
    ("script", "ending"), [(PUT_BLOCKING, signal.SIGKILL), (PUT_NONBLOCKING, signal.SIGTERM)]
)
def test_acknowledged_chunks_are_found_after_restart(tmp_path, script, ending):
    process = run_until_acknowledged(script, str(tmp_path))
    process.send_signal(ending)
    assert process.wait(60) == (0 if ending == signal.SIGTERM else -signal.SIGKILL)
    backend = open_backend(str(tmp_path))
    for index in range(NUM_CHUNKS):
        assert torch.equal(backend.get(make_key(str(index))), make_chunk(seed=index))
    for index in range(NUM_CHUNKS, 1000):  # later chunks are complete or missing
        chunk = backend.get(make_key(str(index)))
        assert chunk is None or torch.equal(chunk, make_chunk(seed=index))
    backend.close()
