"""Storage of the lm:// server, and the server as a program."""

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from lmcache.server.__main__ import main
from lmcache.server.server_storage_backend import (
    CreateStorageBackend,
    LMSBackendInterface,
    LMSLocalBackend,
    LMSLocalDiskBackend,
)
from tests.harness.library.lm_server import (
    EXIST,
    HOST,
    PUT,
    connected,
    dialled,
    head,
    key,
    process,
    received,
    serving,
)


def test_defect_07_invalid_put_leaves_no_lock():
    storage = LMSLocalBackend()
    with pytest.raises(TypeError):
        storage.put("k", None)
    storage.put("k", b"v")
    assert storage.get("k") == b"v"


class CountingDict(OrderedDict):
    """A dict that counts lookups of single keys and refuses to list keys."""

    num_lookups = 0

    def __contains__(self, name):
        self.num_lookups += 1
        return super().__contains__(name)

    def __iter__(self):
        raise AssertionError("the keys were listed")

    __len__ = keys = items = values = copy = __reversed__ = __iter__


@pytest.mark.parametrize("num_keys", [1, 5000])
def test_defect_15_exist_costs_the_same_for_any_number_of_keys(num_keys):
    storage = LMSLocalBackend()
    storage.dict = CountingDict((key(number), b"x") for number in range(num_keys))
    assert storage.contains(key(0))
    assert not storage.contains("missing")
    assert storage.dict.num_lookups == 2


def test_device_name_selects_the_storage(tmp_path):
    assert isinstance(CreateStorageBackend("cpu"), LMSLocalBackend)
    storage = CreateStorageBackend(str(tmp_path / "a" / "b"))
    assert isinstance(storage, LMSLocalDiskBackend)
    storage.close()
    assert issubclass(LMSLocalDiskBackend, LMSBackendInterface)
    with pytest.raises(ValueError, match="cuda"):
        CreateStorageBackend("cuda")
    for size in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not a size"):
            CreateStorageBackend("cpu", size)


def test_put_replaces_an_object_that_cannot_be_read(tmp_path):
    """The format of the object may have another version. A tier does not replace objects by name."""
    storage = LMSLocalDiskBackend(str(tmp_path))
    storage.put("k", b"old")
    (file,) = (path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096)
    damaged = bytearray(file.read_bytes())
    damaged[8] += 1
    file.write_bytes(damaged)
    storage.put("k", b"new")
    assert bytes(storage.get("k")) == b"new"
    storage.close()


def test_defect_04_acknowledged_objects_are_intact_after_a_kill_during_a_put(tmp_path):
    dice = random.Random(4)
    payloads = {key(number): dice.randbytes(1 << 20) for number in range(6)}
    with process(str(tmp_path)) as (child, port), dialled(port) as peer:
        for name, payload in payloads.items():
            peer.sendall(head(PUT, name, len(payload)) + payload + head(EXIST, name))
            assert received(peer, 8) == struct.pack("ii", 200, 0)
        peer.sendall(head(PUT, key(9), 1 << 20) + bytes(1 << 19))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    with serving(str(tmp_path)) as server, connected(server) as connector:
        assert {name: connector.get(name) for name in payloads} == payloads
        assert connector.get(key(9)) is None
        assert sorted(connector.list()) == sorted(payloads)


def test_program_ends_at_sigterm_and_does_not_import_torch(tmp_path):
    with process() as (child, port):
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        with dialled(port) as peer:
            peer.sendall(head(EXIST, "k"))
            assert received(peer, 8) == struct.pack("ii", 400, 0)
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=60) == 0
            assert received(peer, 1) == b""
    assert "libtorch" not in maps


SIGNALLED_PROGRAM = """
import signal, threading, time
from lmcache.server.__main__ import main

def send_signal():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=send_signal, daemon=True).start()
main(["127.0.0.1", "0"])
"""


def test_signal_to_another_thread_ends_the_program():
    """A signal just before the main thread waits for a client has the same effect."""
    process_result = subprocess.run(
        [sys.executable, "-c", SIGNALLED_PROGRAM], check=True, capture_output=True
    )
    assert b"listening" in process_result.stdout


def test_memory_is_allocated_for_received_bytes_only():
    with process() as (child, port), contextlib.ExitStack() as peers:
        for _ in range(20):
            peer = peers.enter_context(dialled(port))
            peer.sendall(head(PUT, "k", 1 << 30) + bytes(1000))
        last = peers.enter_context(dialled(port))
        last.sendall(head(EXIST, "k"))
        assert received(last, 8) == struct.pack("ii", 400, 0)
        status = Path(f"/proc/{child.pid}/status").read_text()
    (resident,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")]
    assert resident < 500 << 10  # KiB


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.invalid", "0"], "lmcache_server: "),
        ([HOST, "99999"], "lmcache_server: "),
        ([HOST, "0", "cuda"], "not supported"),
        ([HOST, "0", "/proc/none"], "lmcache_server: "),
        ([HOST, "0", "cpu", "--max-size-gb", "-1"], "not a size"),
    ],
)
def test_failed_start_reports_the_cause(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)
