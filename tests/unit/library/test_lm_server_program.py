"""The lm:// server's storage, and the server as a program."""

from __future__ import annotations

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

from lmcache.protocol import ClientMetaMessage, Constants
from lmcache.server.__main__ import main
from lmcache.server.server_storage_backend import (
    CreateStorageBackend,
    LMSBackendInterface,
    LMSLocalBackend,
    LMSLocalDiskBackend,
)
from tests.harness.lm_server import (
    EXIST,
    GET,
    HOST,
    LIST,
    PUT,
    connected,
    dialled,
    head,
    key,
    process,
    received,
    serving,
)


def test_defect_07_a_put_of_nothing_leaves_no_lock_behind():
    storage = LMSLocalBackend()
    with pytest.raises(TypeError):
        storage.put("k", None)
    storage.put("k", b"v")
    assert storage.get("k") == b"v"


class OnlyAsked(OrderedDict):
    """Counts questions for one key, and allows no others."""

    num_asked = 0

    def __contains__(self, name):
        self.num_asked += 1
        return super().__contains__(name)

    def __iter__(self):
        raise AssertionError("the keys were listed")

    __len__ = keys = items = values = copy = __reversed__ = __iter__


@pytest.mark.parametrize("num_keys", [1, 5000])
def test_defect_15_exist_costs_the_same_for_any_number_of_keys(num_keys):
    storage = LMSLocalBackend()
    storage.dict = OnlyAsked((key(number), b"x") for number in range(num_keys))
    assert storage.contains(key(0))
    assert not storage.contains("none")
    assert storage.dict.num_asked == 2


def test_storage_is_chosen_by_name(tmp_path):
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


def test_a_flipped_byte_on_disk_is_a_miss(tmp_path):
    storage = LMSLocalDiskBackend(str(tmp_path), 1 << 24)
    storage.put(key(1), b"payload" * 1000)
    (path,) = tmp_path.rglob("*.0")
    raw = bytearray(path.read_bytes())
    raw[4096 + 100] ^= 1
    path.write_bytes(raw)
    assert storage.get(key(1)) is None
    storage.close()


def test_defect_04_after_a_kill_in_a_put_what_was_acknowledged_is_right(tmp_path):
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


def test_the_program_ends_at_sigterm_and_needs_no_torch(tmp_path):
    with process() as (child, port):
        maps = Path(f"/proc/{child.pid}/maps").read_text()
        with dialled(port) as peer:
            peer.sendall(head(EXIST, "k"))
            assert received(peer, 8) == struct.pack("ii", 400, 0)
            child.send_signal(signal.SIGTERM)
            assert child.wait(timeout=60) == 0
            assert received(peer, 1) == b""
    assert "libtorch" not in maps


SIGNALLED = """
import signal, threading, time
from lmcache.server.__main__ import main

def tell():
    while signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

threading.Thread(target=tell, daemon=True).start()
main(["127.0.0.1", "0"])
"""


def test_a_signal_that_does_not_wake_the_main_thread_ends_it():
    """As one does that comes just before the main thread waits for a client."""
    ended = subprocess.run([sys.executable, "-c", SIGNALLED], timeout=60, check=True, capture_output=True)
    assert b"listening" in ended.stdout


def test_memory_is_taken_for_what_comes_not_for_what_is_declared():
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
def test_the_program_says_why_it_does_not_start(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)


def test_the_program_explains_itself(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--max-size-gb" in capsys.readouterr().out


def test_commands_are_those_of_the_protocol():
    assert (PUT, GET, EXIST, LIST) == (
        Constants.CLIENT_PUT,
        Constants.CLIENT_GET,
        Constants.CLIENT_EXIST,
        Constants.CLIENT_LIST,
    )
    assert head(GET, "k", 3) == ClientMetaMessage(GET, "k", 3).serialize()
