"""What only the simulated driver can be told to do: break, hang, die, run out, be old."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from lmcache.cuda import ipc
from lmcache.cuda.copies import CopyBatch
from lmcache.cuda.driver import Device, Event, Stream
from lmcache.cuda.errors import CudaError
from lmcache.cuda.pins import Pins
from testing import cuda, cuda_memory, cuda_peers
from testing.cuda import GPU, MIG_SLICE, OTHER_GPU
from testing.cuda_memory import pages
from testing.cuda_peers import open_context, peer

SIZE = 1 << 20
DATA = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def node():
    with cuda.node() as node:
        yield node


def failure(state, function, *arguments):
    """What a function of a peer ends with: the error's class, code and whether it is sticky."""
    try:
        return function(state, *arguments)
    except CudaError as error:
        return error.code, error.is_sticky
    except Exception as error:
        return repr(error)


# ---- devices ----


def visible(state):
    return [device.uuid for device in Device.visible()]


def find(state, uuid):
    return Device.find(uuid).ordinal


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        (None, [GPU, OTHER_GPU, MIG_SLICE]),
        ("1", [OTHER_GPU]),
        (f"{MIG_SLICE},0", [MIG_SLICE, GPU]),
        (OTHER_GPU[:12], [OTHER_GPU]),
        ("0,7,1", [GPU]),
    ],
)
def test_what_a_process_can_see(wanted, seen):
    with cuda.node([GPU, OTHER_GPU, MIG_SLICE]) as node:
        environment = node.environment() | ({} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted})
        with peer(**environment) as process:
            assert process.call(visible) == seen
            assert process.call(find, seen[-1].lower()) == len(seen) - 1
            hidden = process.call(failure, find, "GPU-" + "9" * 8)
            assert hidden.startswith("DeviceNotVisibleError")


@pytest.mark.parametrize("hidden", ["", "-1", "GPU-9"])
def test_no_gpu_is_visible(node, hidden):
    with peer(**node.environment(), CUDA_VISIBLE_DEVICES=hidden) as process:
        assert "no NVIDIA GPU is visible here" in process.call(failure, visible)


def test_a_device_of_one_process(node):
    """Compute mode exclusive: until the other's context is gone, also when it was killed."""
    environment = node.environment(compute_mode=3)
    with peer(**environment) as first, peer(**environment) as second:
        first.call(open_context)
        assert second.call(failure, open_context) == (46, False)
        first.process.kill()
        first.process.join()
        second.call(open_context)


def test_no_memory_is_left_for_a_context(node):
    environment = node.environment(memory=64 << 20, context_bytes=40 << 20)
    with peer(**environment) as first, peer(**environment) as second:
        first.call(open_context)
        assert second.call(failure, open_context) == (2, False)
        first.process.kill()
        first.process.join()
        second.call(open_context)


def free_bytes(state):
    return int(state["context"].call("cuMemGetInfo")[0])


def open_mapping(state, handle):
    state["mapping"] = state["mappings"].open(handle)


def close_mapping(state):
    state["mapping"].close()


def test_a_mapping_keeps_the_memory_of_a_dead_process_in_use(node):
    environment = node.environment(memory=4 * SIZE)
    with peer(**environment) as owner, peer(**environment) as importer, peer(**environment) as restarted:
        for each in (owner, importer, restarted):
            each.call(open_context)
        exported = owner.call(cuda_peers.export_content, DATA * 3)
        importer.call(open_mapping, exported.handle)
        owner.process.kill()
        owner.process.join()
        assert restarted.call(failure, cuda_peers.export_content, DATA * 3) == (2, False)
        importer.call(close_mapping)
        assert restarted.call(free_bytes) == 4 * SIZE
        restarted.call(cuda_peers.export_content, DATA * 3)


# ---- handles ----


def test_memory_of_virtual_memory_management_has_no_handle(node):
    with peer(**node.environment()) as process:
        process.call(open_context)
        assert process.call(export_virtual_memory) == (False, (1, False))


def export_virtual_memory(state):
    context = state["context"]
    bindings = context.driver.bindings
    handle = context.call("cuMemCreate", SIZE, bindings.CUmemAllocationProp(), 0)
    address = int(context.call("cuMemAddressReserve", SIZE, 0, 0, 0))
    context.call("cuMemMap", address, SIZE, 0, handle, 0)
    context.call("cuMemcpyHtoD", address, DATA, SIZE)
    assert cuda_memory.content(context, address, SIZE) == DATA
    assert Device.of(address) == context.device
    result = ipc.is_exportable(context, address), failure(state, lambda _: ipc.export(context, address))
    context.call("cuMemUnmap", address, SIZE)
    return result


def free_and_export_again(state, data):
    cuda_peers.free(state)
    return cuda_peers.export_content(state, data)


@pytest.mark.parametrize("same_handles", ["", "1"])
def test_a_handle_may_be_that_of_another_allocation_at_the_same_address(node, same_handles):
    """A kept mapping then shows the old bytes: only a new one shows the new."""
    other = os.urandom(SIZE)
    environment = node.environment(same_handles=same_handles)
    with peer(**environment) as owner, peer(**environment) as importer:
        owner.call(open_context)
        importer.call(open_context)
        first = owner.call(cuda_peers.export_content, DATA)
        importer.call(open_mapping, first.handle)
        second = owner.call(free_and_export_again, other)
        assert second.base == first.base
        assert (second.handle == first.handle) == bool(same_handles)
        if same_handles:  # opened again while it is open: the old mapping
            assert importer.call(cuda_peers.read, second.handle, 0, SIZE) == DATA
        importer.call(close_mapping)
        assert importer.call(cuda_peers.read, second.handle, 0, SIZE) == other


_EXPORT = """
import os, sys
from testing import cuda_memory, cuda_peers
state = {}
cuda_peers.open_context(state)
print(os.getpid(), cuda_peers.export_content(state, b"7" * 4096).handle.hex(), flush=True)
sys.stdin.read()
"""
_OPEN = """
import os, sys
from lmcache.cuda.errors import CudaError
from testing import cuda_memory, cuda_peers
for _ in range(int(sys.argv[2])):
    if os.fork():  # the child has another number
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
state = {}
cuda_peers.open_context(state)
try:
    print(os.getpid(), cuda_peers.read(state, bytes.fromhex(sys.argv[1]), 0, 4).decode())
except CudaError as error:
    print(os.getpid(), error.code)
"""
_NAMESPACE = ["unshare", "--fork", "--pid", "--kill-child"]


@pytest.mark.skipif(
    subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="PID namespaces can't be made here",
)
def test_equal_process_ids_in_two_namespaces_are_one_process_to_the_driver(node):
    environment = {**os.environ, **node.environment(), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(code, *arguments):
        return subprocess.Popen(
            [*_NAMESPACE, sys.executable, "-c", code, *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with start(_EXPORT) as exporter:
        pid, handle = exporter.stdout.readline().split()
        assert pid == "1"
        for forks, is_first, answer in ((0, True, "201"), (1, False, "7777")):
            with start(_OPEN, handle, str(forks)) as importer:
                pid, result = importer.stdout.read().split()
                assert (pid == "1", result) == (is_first, answer)
        exporter.stdin.close()


# ---- copies ----


def copy(state, to, from_, size=SIZE):
    CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size))).submit(state["stream"])
    state["stream"].synchronize()


def submit(state, to, from_, size=SIZE):
    CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size))).submit(state["stream"])


def make_memory(state):
    state["device"] = cuda_memory.allocate(state["context"], DATA)
    state["host"] = pages(2 * SIZE)
    state["pins"] = Pins(state["context"], state["host"].ctypes.data, SIZE)
    state["pins"].set_ready(SIZE)
    assert state["pins"].wait(60)
    return state["device"], state["host"].ctypes.data


def held(state):
    return bytes(state["host"][:SIZE])


@contextlib.contextmanager
def copying(node, **settings):
    with peer(**node.environment("copier", **settings)) as process:
        process.call(open_context)
        device, host = process.call(make_memory)
        yield process, device, host


def free_device_memory(state):
    state["context"].call("cuMemFree", state["device"])


def unpin(state):
    state["pins"].close()


def synchronize(state):
    state["stream"].synchronize()


@pytest.mark.parametrize("vanish", [free_device_memory, unpin], ids=lambda function: function.__name__)
def test_a_copy_of_memory_that_is_gone_breaks_the_context(node, vanish):
    """Where hardware may read what others wrote there meanwhile."""
    with copying(node) as (process, device, host):
        node.order("copier: stall")
        process.call(submit, host, device)
        process.call(vanish)
        node.order("")
        assert process.call(failure, synchronize) == (700, True)
        assert process.call(failure, free_bytes) == (700, True)  # whatever is called
        assert node.count("illegal_pieces") == 1


@pytest.mark.parametrize(("shift", "size"), [(SIZE, 4096), (0, SIZE + 1), (1 << 40, 1)])
def test_a_copy_beyond_the_allocation_breaks_the_context(node, shift, size):
    with copying(node) as (process, device, host):
        assert process.call(failure, copy, host, device + shift, size)[0] in {1, 700}
        assert process.call(held) == bytes(SIZE)
    with copying(node) as (process, device, _):
        host = process.call(make_memory)[1]
        assert process.call(failure, copy, host + 2 * SIZE - 8192, device + shift, 4096 + size)[0] == 700


def test_a_copy_from_host_memory_that_is_not_there(node):
    with copying(node) as (process, device, _):
        assert process.call(failure, copy, device, 4096, 4096) == (700, True)


def test_a_copy_over_two_registrations_is_refused_and_nothing_sticks(node):
    with copying(node) as (process, device, host):
        assert process.call(failure, copy, host + SIZE - 4096, device, 8192) == (1, False)
        process.call(copy, host, device)
        assert process.call(held) == DATA


def test_copies_from_pageable_memory_are_counted(node):
    with copying(node) as (process, device, host):
        process.call(copy, host, device)
        assert node.count("pageable_pieces") == 1  # of filling the device's memory
        process.call(copy, host + SIZE, device)
        assert node.count("pageable_pieces") == 2


def pin_slowly_and_copy(state, path, num_bytes, to_copy):
    """A large arena, none of which is pinned when its first slot is copied."""
    with open(path, "rb+") as file:
        arena = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    pins = Pins(state["context"], arena.ctypes.data, num_bytes)
    pins.set_ready(num_bytes)
    copy(state, arena.ctypes.data, to_copy)
    return bytes(arena[:SIZE]) == DATA and not pins.pinned_bytes


def test_the_first_slot_of_a_large_arena_does_not_wait_for_its_pins(node, tmp_path):
    arena = tmp_path / "arena"
    with arena.open("wb") as file:
        file.truncate(64 << 30)  # of which only what is touched is real
    with copying(node) as (process, device, _):
        node.order("copier: pin_rate 1000")
        assert process.call(pin_slowly_and_copy, arena, 64 << 30, device)


def shrink_while_pinning(state, num_bytes):
    """Less is ready while the rest is being registered: is it still, when that is said?"""
    host = pages(num_bytes)
    pins = Pins(state["context"], host.ctypes.data, num_bytes, num_bytes)
    pins.set_ready(num_bytes)
    while not pins._under_way:
        pass
    pins.set_ready(0)
    return pins.pinned_bytes


def test_what_is_being_pinned_is_unpinned_before_it_goes(node):
    with copying(node) as (process, _, _):
        before = node.count("pins")
        node.order(f"copier: pin_rate {4 * SIZE}")
        assert process.call(shrink_while_pinning, SIZE) == 0
        assert node.count("pins") == before


def test_a_driver_before_batches(node):
    with copying(node, driver_version=12040) as (process, device, host):
        process.call(copy, host, device)
        assert process.call(held) == DATA
        assert node.count("batches") == 0


def test_the_nth_call_fails(node):
    with copying(node) as (process, device, host):
        node.order("copier: fail cuMemcpyBatchAsync 2 1; other: fail cuMemcpyBatchAsync 1 1")
        process.call(copy, host, device)
        assert process.call(failure, copy, host, device) == (1, False)
        process.call(copy, host, device)
        node.order("fail cuMemcpyBatchAsync * 719")
        assert process.call(failure, copy, host, device) == (719, True)
        node.order("")
        assert process.call(failure, copy, host, device) == (719, True)


def test_orders_from_the_start(node):
    with peer(**node.environment(orders="fail cuDevicePrimaryCtxRetain 1 2")) as process:
        assert process.call(failure, open_context) == (2, False)
        process.call(open_context)


@pytest.mark.parametrize("order", ["fail cuMemcpyBatchAsink 1 1", "fail cuInit", "stal", "rates 7"])
def test_an_order_that_is_none_ends_who_reads_it(node, order):
    with peer(**node.environment(orders=order)) as process:
        with pytest.raises((EOFError, ConnectionResetError)):
            process.call(open_context)
        process.process.join(60)
        assert process.process.exitcode == -signal.SIGABRT


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemAlloc_v2"])
def test_functions_are_named_with_or_without_their_version(node, function):
    with copying(node) as (process, _, _):
        node.order(f"fail {function} 1 2")
        assert process.call(failure, cuda_peers.export_content, DATA) == (2, False)


def test_copies_at_a_given_rate(node):
    with copying(node) as (process, device, host):
        node.order(f"rate {SIZE * 10}")
        start = time.monotonic()
        process.call(copy, host, device)
        assert time.monotonic() - start >= 0.09
        assert process.call(held) == DATA


def test_a_process_that_dies_in_mid_copy(node):
    with copying(node) as (process, device, host):
        node.order(f"copier: die_after {SIZE // 2}")
        with pytest.raises(EOFError):
            process.call(copy, host, device)
        process.process.join(60)
        assert process.process.exitcode == -signal.SIGKILL
    assert node.processes() == []


# ---- calls that fail ----


def open_only(state, handle):
    state["mapping"] = state["mappings"].open(handle)
    return len(state["mappings"])


def test_a_mapping_of_unknown_size_is_closed_again(node):
    with peer(**node.environment("owner")) as owner, peer(**node.environment("importer")) as importer:
        owner.call(open_context)
        importer.call(open_context)
        exported = owner.call(cuda_peers.export_content, DATA)
        node.order("importer: fail cuMemGetAddressRange 1 1")
        assert importer.call(failure, open_only, exported.handle) == (1, False)
        assert node.count("mappings") == 0
        assert importer.call(open_only, exported.handle) == 1


def call(state, function, *arguments):
    return state["context"].call(function, *arguments)


def is_done(state):
    event = Event(state["context"])
    event.record(state["stream"])
    return event.is_done()


def test_functions_that_a_driver_lacks_and_events_that_fail(node):
    with copying(node) as (process, _, _):
        assert process.call(failure, call, "cuCtxGetLimit", 0)[0] == 500
        node.order("fail cuEventQuery 1 719")
        assert process.call(failure, is_done) == (719, True)


def pin_again(state):
    pins = Pins(state["context"], state["host"].ctypes.data + SIZE, SIZE, SIZE // 2)
    pins.set_ready(SIZE)
    assert pins.wait(60)
    return pins.failures, pins.pinned_bytes


def test_memory_that_can_not_be_pinned_is_copied_all_the_same(node):
    with copying(node) as (process, device, host):
        node.order("fail cuMemHostRegister 1 2")
        assert process.call(pin_again) == (1, SIZE // 2)
        process.call(copy, host, device)
        process.call(copy, host + SIZE, device, SIZE // 2)
        assert process.call(held) == DATA


# ---- leaks ----


def attach_cycles(state, handle, number):
    """What an attach makes, and what its end must take away."""
    host = state["host"]
    for _ in range(number):
        mapping = state["mappings"].open(handle)
        stream = Stream(state["context"])
        pins = Pins(state["context"], host.ctypes.data, SIZE, SIZE // 2)
        pins.set_ready(SIZE)
        assert pins.wait(60)
        pieces = np.arange(8, dtype=np.uint64) * np.uint64(SIZE // 8)
        to, from_ = (np.uint64(base) + pieces for base in (host.ctypes.data, mapping.base))
        CopyBatch(to, from_[::-1].copy(), np.full(8, SIZE // 8, np.uint64), pins.edges).submit(stream)
        stream.synchronize()
        stream.close()
        pins.close()
        mapping.close()


def test_a_thousand_attach_cycles_leave_nothing(node):
    with peer(**node.environment("owner")) as owner, copying(node) as (process, _, _):
        owner.call(open_context)
        exported = owner.call(cuda_peers.export_content, DATA)
        process.call(unpin)
        process.call(attach_cycles, exported.handle, 1)
        (before,) = node.processes("copier")
        for _ in range(10):
            process.call(attach_cycles, exported.handle, 100)
        (after,) = node.processes("copier")
    kinds = (
        "contexts",
        "allocations",
        "allocated_bytes",
        "mappings",
        "streams",
        "events",
        "pins",
        "pinned_bytes",
    )
    assert {kind: after[kind] for kind in kinds} == {kind: before[kind] for kind in kinds}
    assert after["batches"] == before["batches"] + 1000
    assert after["writes_to_imports"] == 0
