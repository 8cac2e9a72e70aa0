"""``python -m testing.soak.client SOCKET COUNTS SEED``: loads and stores rows, and compares each loaded byte.

The process runs until SIGTERM. It writes its counts into the file COUNTS all the time, because it may be
killed. It exits with status 3 after a wrong byte.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from pathlib import Path

from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import SidecarError
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import SidecarSession
from lmcache_store.kv_groups import KVGroup
from lmcache_store.tiers.base import ROW_KEY_BYTES
from lmcache_store.tiers.memory.contracts import Slot
from testing.soak import rows

WRONG_STATUS = 3
_PROMOTION_SECONDS = 1.0
"""Time that a request waits for rows of lower tiers."""
_POLL_SECONDS = 0.005
_COUNTS_SECONDS = 0.25


class WrongBytesError(Exception):
    """A load gave bytes that no client stored under the key."""


class Traffic:
    """One engine with a scheduler and a worker. Requests run one after the other."""

    def __init__(self, socket_path: str, seed: int, ending: threading.Event) -> None:
        self.counts: Counter[str] = Counter()
        self._rng, self._ending = random.Random(seed), ending
        group = KVGroup(group=0, block_tokens=rows.BLOCK_TOKENS, chunk_bytes=rows.ROW_BYTES)
        engine = uuid.uuid4().bytes
        self._scheduler, self._worker = (
            SidecarClient(
                socket_path,
                ClientHello(role, engine, rows.NAMESPACE, rows.CHUNK_TOKENS, (group,), model="soak"),
            )
            for role in (Role.SCHEDULER, Role.WORKER)
        )

    def start(self) -> None:
        """Attach in the background."""
        self._scheduler.start()
        self._worker.start()

    def close(self) -> None:
        """Detach."""
        self._worker.close()
        self._scheduler.close()

    def run_request(self) -> None:
        """Load what is cached of a prompt, and store the rest. Raises WrongBytesError."""
        scheduler, worker = self._scheduler.session, self._worker.session
        if scheduler is None or worker is None:
            self.counts["waits"] += 1
            self._ending.wait(0.05)
            return
        prompt = min(int(self._rng.paretovariate(0.5)), rows.NUM_PROMPTS * 4) % rows.NUM_PROMPTS
        request_id = uuid.uuid4().hex
        try:
            self._serve(scheduler, worker, prompt, request_id)
            self.counts["requests"] += 1
        except SidecarError as error:
            self.counts[f"failed: {type(error).__name__}"] += 1
        finally:
            self._release(request_id)

    def _serve(self, scheduler: SidecarSession, worker: SidecarSession, prompt: int, request_id: str) -> None:
        keys, tenant = rows.row_keys(prompt), rows.tenant(prompt)
        num_leased = self._lookup(scheduler, keys, tenant, request_id)
        slots = scheduler.index.find(rows.words(keys)).slots()[:num_leased]
        report = Scheduled(
            num_hit_chunks=len(slots),
            num_loaded_tokens=len(slots) * rows.CHUNK_TOKENS,
            num_prompt_tokens=rows.NUM_CHUNKS * rows.CHUNK_TOKENS,
        )
        scheduler.lookup(request_id, [(0, keys)], tenant=tenant, hint=True, scheduled=report)
        self.counts["looked_up"] += rows.NUM_CHUNKS
        self._load(worker, prompt, slots)
        self._store(worker, prompt, len(slots), keys[len(slots) * ROW_KEY_BYTES :], request_id)

    def _lookup(self, scheduler: SidecarSession, keys: bytes, tenant: bytes, request_id: str) -> int:
        """Lease the leading rows in memory. Waits for rows that the sidecar promotes."""
        deadline = time.monotonic() + _PROMOTION_SECONDS
        while True:
            result = scheduler.lookup(request_id, [(0, keys)], tenant=tenant)
            is_settled = not result.num_pending and not result.is_probing
            if is_settled or time.monotonic() > deadline or self._ending.is_set():
                return result.num_leased
            time.sleep(_POLL_SECONDS)

    def _load(self, worker: SidecarSession, prompt: int, slots: list[Slot]) -> None:
        with worker.copying():
            copies = [worker.view(slot.row, rows.ROW_BYTES).copy() for slot in slots]
            are_valid = [worker.holds(slot) for slot in slots]
        for chunk, (loaded, is_valid) in enumerate(zip(copies, are_valid, strict=True)):
            if not is_valid:
                self.counts["reused"] += 1
                continue
            if (loaded != rows.content(prompt, chunk)).any():
                raise WrongBytesError(f"prompt {prompt}, chunk {chunk}, slot {slots[chunk]}")
            self.counts["loaded"] += 1

    def _store(
        self, worker: SidecarSession, prompt: int, first: int, missing: bytes, request_id: str
    ) -> None:
        if not missing:
            return
        tenant = rows.tenant(prompt)
        answers = worker.reserve(0, missing, request_id=request_id, first_chunk=first, tenant=tenant)
        with worker.copying():
            stored = []
            for chunk, answer in enumerate(answers, first):
                if answer.slot is not None:
                    worker.view(answer.slot.row, rows.ROW_BYTES)[:] = rows.content(prompt, chunk)
                    stored.append(answer.slot)
            if self._rng.random() < 0.02:
                worker.abort(stored)
                self.counts["aborted"] += len(stored)
            else:
                worker.commit(stored)
                self.counts["stored"] += len(stored)

    def _release(self, request_id: str) -> None:
        session = self._scheduler.session
        try:
            if session is None:
                self._scheduler.release_later(request_id)
            else:
                session.release([request_id])
        except SidecarError:  # the client sends it again
            self.counts["late releases"] += 1


def write_counts(path: Path, counts: Counter[str]) -> None:
    """Replace the file with the counts."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(counts))
    os.replace(fresh, path)


def main() -> int:
    """Run requests until SIGTERM. Returns the exit status."""
    socket_path, counts_path, seed = sys.argv[1:]
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    traffic = Traffic(socket_path, int(seed), ending)
    traffic.start()
    status, written = 0, 0.0
    try:
        while not ending.is_set():
            traffic.run_request()
            if time.monotonic() > written + _COUNTS_SECONDS:
                write_counts(Path(counts_path), traffic.counts)
                written = time.monotonic()
    except WrongBytesError as error:
        print(f"wrong bytes: {error}", flush=True)
        traffic.counts["wrong"] += 1
        status = WRONG_STATUS
    traffic.close()
    write_counts(Path(counts_path), traffic.counts)
    return status


if __name__ == "__main__":
    sys.exit(main())
