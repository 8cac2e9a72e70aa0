"""Scheduler client and worker client of a real sidecar, without an engine."""

from __future__ import annotations

import hashlib
import uuid
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Found, Slot
from testing.child_process import wait_until
from testing.processes import SidecarProcess

NAMESPACE = hashlib.sha256(b"benchmark").digest()
CHUNK_TOKENS, BLOCK_TOKENS = 256, 16


def row_keys(prompt: int, number: int) -> bytes:
    """Return the joined row keys of a prompt's chunks."""
    digests = (hashlib.sha256(b"%d/%d" % (prompt, chunk)).digest() for chunk in range(number))
    return b"".join(NAMESPACE + digest for digest in digests)


def words(keys: bytes) -> npt.NDArray[np.uint64]:
    """Return row keys in the format of the index: ``[n, 8]`` words."""
    return np.frombuffer(keys, np.uint64).reshape(-1, ROW_KEY_BYTES // 8)


class EngineClients:
    """Clients of one engine. The context manager waits until both are attached."""

    def __init__(self, sidecar: SidecarProcess, chunk_bytes: int) -> None:
        engine = uuid.uuid4().bytes
        group = KVGroup(group=0, block_tokens=BLOCK_TOKENS, chunk_bytes=chunk_bytes)
        self._clients = [
            SidecarClient(sidecar.socket_path, ClientHello(role, engine, NAMESPACE, CHUNK_TOKENS, (group,)))
            for role in (Role.SCHEDULER, Role.WORKER)
        ]

    def __enter__(self) -> EngineClients:
        for client in self._clients:
            client.start()
        self.scheduler, self.worker = (
            wait_until(partial(getattr, client, "session"), what="attached") for client in self._clients
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()

    scheduler: SidecarSession
    worker: SidecarSession

    def find(self, keys: npt.NDArray[np.uint64]) -> Found:
        """Read the index in shared memory."""
        return self.scheduler.index.find(keys)

    def fill(self, keys: bytes) -> list[Slot]:
        """Commit rows without copying into them. Rows that exist already are unchanged."""
        slots = [reservation.slot for reservation in self.worker.reserve(0, keys) if reservation.slot]
        with self.worker.copying():
            self.worker.commit(slots)
        return slots
