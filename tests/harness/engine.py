"""Both sides of an engine in this process, with a real sidecar: store and load rows of random bytes."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import SidecarSession
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.sidecar.wire import attached, make_hello, make_keys, slots_of, usable

CHUNK_BYTES = 100_000


@pytest.fixture
def sidecar():
    with SidecarProcess() as process:
        yield process


@pytest.fixture
def connect(sidecar):
    clients = []

    def make(*arguments, **fields) -> SidecarClient:
        clients.append(SidecarClient(sidecar.socket_path, make_hello(*arguments, **fields)))
        clients[-1].start()
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def attach(sidecar, connect):
    """A function that attaches an engine, and waits until all memory can be used."""

    def make(*arguments, **fields) -> SidecarSession:
        session = attached(connect(*arguments, **fields))
        sidecar.wait_usable()
        return session

    return make


@pytest.fixture
def scheduler(connect) -> SidecarSession:
    return attached(connect(Role.SCHEDULER))


def report(
    scheduler: SidecarSession, request: str, *numbers: int, prefill_rate: float = 0.0, **counts: Any
) -> None:
    """Report a scheduled prompt of these chunks and five more tokens, as the engine's scheduler does."""
    scheduled = Scheduled(**({"num_prompt_tokens": 256 * len(numbers) + 5} | counts))
    keys = [(0, make_keys(*numbers))]
    scheduler.lookup(request, keys, hint=True, scheduled=scheduled, prefill_tokens_per_second=prefill_rate)


def mapped_slots(session: SidecarSession) -> npt.NDArray[np.uint8]:
    """Return the memory of the column of an attached session, one row per slot."""
    assert session.slots is not None
    return session.slots


@contextlib.contextmanager
def session_of(sidecar: SidecarProcess, **fields: Any) -> Iterator[SidecarSession]:
    """The session of an engine that is attached to a fully populated arena."""
    client = SidecarClient(sidecar.socket_path, make_hello(**fields))
    client.start()
    try:
        session = attached(client)
        usable(sidecar)
        yield session
    finally:
        client.close()


def payload(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, dtype=np.uint8)


def store(session: SidecarSession, *numbers: int) -> None:
    with session.copying():
        slots = [reservation.slot for reservation in session.reserve(0, make_keys(*numbers))]
        for slot, number in zip(slots, numbers, strict=True):
            mapped_slots(session)[slot.row, :CHUNK_BYTES] = payload(number)
        session.commit(slots)


def load(
    scheduler: SidecarSession, worker: SidecarSession, request_id: str, *numbers: int
) -> list[np.ndarray]:
    """Lease, copy, verify and release rows."""
    keys = make_keys(*numbers)
    result = scheduler.lookup(request_id, [(0, keys)])
    slots = slots_of(scheduler, keys)[: result.num_leased]
    with worker.copying():
        copies = [mapped_slots(worker)[slot.row, :CHUNK_BYTES].copy() for slot in slots]
        assert all(map(worker.holds, slots))
    scheduler.release([request_id])
    return copies


def restart_without_memory(sidecar: SidecarProcess) -> None:
    """End a sidecar, unless it has ended, and start it again with an empty memory tier."""
    if sidecar.is_running:
        assert sidecar.terminate() == 0
    sidecar.arena_path.unlink()
    sidecar.start()


def check_promoted(session: SidecarSession, *numbers: int) -> None:
    """Wait until all these rows are in memory, and compare their bytes."""
    wait_until(lambda: session.lookup("r", [(0, make_keys(*numbers))]).num_leased == len(numbers))
    assert_stored(load(session, session, "r", *numbers), *numbers)


def assert_stored(copies: list[np.ndarray], *numbers: int) -> None:
    assert len(copies) == len(numbers)
    for copy, number in zip(copies, numbers, strict=True):
        assert np.array_equal(copy, payload(number))
