"""Copies on the simulated driver that break, hang, are slow, or run on an old driver."""

import mmap
import signal
import time

import numpy as np
import pytest

from lmcache.cuda.copies import CopyBatch
from lmcache.cuda.driver import Event, Stream
from lmcache.cuda.pins import Pins
from testing import cuda_peers
from testing.cuda_memory import pages
from testing.cuda_peers import open_context, peer
from tests.harness.simulated_gpu import (
    DATA,
    SIZE,
    copy,
    copying,
    failure,
    free_bytes,
    held,
    node,
    submit,
)

__all__ = ["node"]

pytestmark = pytest.mark.rotating  # these tests are about the simulation


# ---- copies ----


def free_device_memory(state):
    state["context"].call("cuMemFree", state["device"])


def unpin(state):
    state["pins"].close()


def synchronize(state):
    state["stream"].synchronize()


@pytest.mark.parametrize("vanish", [free_device_memory, unpin], ids=lambda function: function.__name__)
def test_copying_freed_memory_breaks_the_context(node, vanish):
    """Hardware might read memory that other processes have written meanwhile."""
    with copying(node) as (process, device, host):
        node.order("copier: stall")
        process.call(submit, host, device)
        process.call(vanish)
        node.order("")
        assert process.call(failure, synchronize) == (700, True)
        assert process.call(failure, free_bytes) == (700, True)  # every later call fails, too
        assert node.count("illegal_pieces") == 1


@pytest.mark.parametrize(("shift", "size"), [(SIZE, 4096), (SIZE - 4096, 8192), (1 << 40, 1)])
def test_copying_beyond_the_allocation_breaks_the_context(node, shift, size):
    with copying(node) as (process, device, host):
        assert process.call(failure, copy, host, device + shift, size) == (700, True)
        assert process.call(held) == bytes(SIZE)


def test_copying_from_unmapped_host_memory_breaks_the_context(node):
    with copying(node) as (process, device, _):
        assert process.call(failure, copy, device, 4096, 4096) == (700, True)


def test_copying_over_two_registrations_is_refused_without_breaking_the_context(node):
    with copying(node) as (process, device, host):
        assert process.call(failure, copy, host + SIZE - 4096, device, 8192) == (1, False)
        process.call(copy, host, device)
        assert process.call(held) == DATA


def test_copies_from_pageable_memory_are_counted(node):
    with copying(node) as (process, device, host):
        process.call(copy, host, device)
        assert node.count("pageable_pieces") == 1  # from filling the device's memory
        process.call(copy, host + SIZE, device)
        assert node.count("pageable_pieces") == 2


def pin_slowly_and_copy(state, path, num_bytes, to_copy):
    """Copy the first slot of a large arena whose pins have only begun."""
    with open(path, "rb+") as file:
        arena = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    pins = Pins(state["context"], arena.ctypes.data, num_bytes)
    pins.set_ready(num_bytes)
    copy(state, arena.ctypes.data, to_copy)
    return bytes(arena[:SIZE]) == DATA and not pins.pinned_bytes


def test_first_slot_of_a_large_arena_does_not_wait_for_pinning(node, tmp_path):
    arena = tmp_path / "arena"
    with arena.open("wb") as file:
        file.truncate(64 << 30)  # a sparse file: only touched pages use memory
    with copying(node) as (process, device, _):
        node.order("copier: pin_rate 1000")
        assert process.call(pin_slowly_and_copy, arena, 64 << 30, device)


def shrink_while_pinning(state, num_bytes):
    """Lower the ready size while a registration runs. Returns the bytes that are pinned afterwards."""
    host = pages(num_bytes)
    pins = Pins(state["context"], host.ctypes.data, num_bytes, num_bytes)
    pins.set_ready(num_bytes)
    while not (pins._registering_end or pins.pinned_bytes):  # on a slow host, pinning may have ended already
        pass
    pins.set_ready(0)
    return pins.pinned_bytes


def test_memory_is_unpinned_before_release_while_pinning_runs(node):
    with copying(node) as (process, _, _):
        before = node.count("pins")
        node.order(f"copier: pin_rate {4 * SIZE}")
        assert process.call(shrink_while_pinning, SIZE) == 0
        assert node.count("pins") == before


def test_driver_without_batched_copies_copies_piece_by_piece(node):
    with copying(node, driver_version=12040) as (process, device, host):
        process.call(copy, host, device)
        assert process.call(held) == DATA
        assert node.count("batches") == 0


def test_orders_make_the_nth_call_fail(node):
    with copying(node) as (process, device, host):
        node.order("copier: fail cuMemcpyBatchAsync 2 1; other: fail cuMemcpyBatchAsync 1 1")
        process.call(copy, host, device)
        assert process.call(failure, copy, host, device) == (1, False)
        process.call(copy, host, device)
        node.order("fail cuMemcpyBatchAsync * 719")
        assert process.call(failure, copy, host, device) == (719, True)
        node.order("")
        assert process.call(failure, copy, host, device) == (719, True)


def test_orders_apply_from_process_start(node):
    with peer(**node.environment(orders="fail cuDevicePrimaryCtxRetain 1 2")) as process:
        assert process.call(failure, open_context) == (2, False)
        process.call(open_context)


@pytest.mark.parametrize("order", ["fail cuMemcpyBatchAsink 1 1", "fail cuInit", "stal", "rates 7"])
def test_invalid_orders_abort_the_process(node, order):
    with peer(**node.environment(orders=order)) as process:
        with pytest.raises((EOFError, ConnectionResetError)):
            process.call(open_context)
        process.process.join(60)
        assert process.process.exitcode == -signal.SIGABRT


@pytest.mark.parametrize("function", ["cuMemAlloc", "cuMemAlloc_v2"])
def test_orders_accept_function_names_with_and_without_version(node, function):
    with copying(node) as (process, _, _):
        node.order(f"fail {function} 1 2")
        assert process.call(failure, cuda_peers.export_content, DATA) == (2, False)


def test_orders_limit_the_copy_rate(node):
    with copying(node) as (process, device, host):
        node.order(f"rate {SIZE * 10}")
        start = time.monotonic()
        process.call(copy, host, device)
        assert time.monotonic() - start >= 0.09  # real time: a lower bound, which no machine breaks
        assert process.call(held) == DATA


def test_orders_kill_the_process_during_a_copy(node):
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


def test_mapping_of_unknown_size_is_closed(node):
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


def test_missing_functions_and_failing_events_raise_their_codes(node):
    with copying(node) as (process, _, _):
        assert process.call(failure, call, "cuCtxGetLimit", 0)[0] == 500
        node.order("fail cuEventQuery 1 719")
        assert process.call(failure, is_done) == (719, True)


def pin_again(state):
    pins = Pins(state["context"], state["host"].ctypes.data + SIZE, SIZE, SIZE // 2)
    pins.set_ready(SIZE)
    assert pins.wait(60)
    return pins.failures, pins.pinned_bytes


def test_memory_that_cannot_be_pinned_is_still_copied(node):
    with copying(node) as (process, device, host):
        node.order("fail cuMemHostRegister 1 2")
        assert process.call(pin_again) == (1, SIZE // 2)
        process.call(copy, host, device)
        process.call(copy, host + SIZE, device, SIZE // 2)
        assert process.call(held) == DATA


# ---- leaks ----


def attach_cycles(state, handle, number):
    """Make everything that an attach makes, and close it."""
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


def test_a_thousand_attach_cycles_leak_nothing(node):
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
