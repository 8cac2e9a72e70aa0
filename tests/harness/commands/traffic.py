"""Requests of an engine to a real sidecar, again and again: each stores a row, and loads an earlier one."""

import contextlib
import itertools
import threading
from collections.abc import Iterator

from lmcache_client.rpc.hello import Role
from lmcache_client.rpc.kvcache_pb2 import Scheduled
from lmcache_client.rpc.session import SidecarSession
from testing.processes import SidecarProcess
from tests.harness.engine import session_of, store
from tests.harness.sidecar.wire import make_keys

CHUNK_TOKENS = 256
_PAUSE_SECONDS = 0.05


@contextlib.contextmanager
def traffic(sidecar: SidecarProcess) -> Iterator[None]:
    """Send about 20 requests per second in the context. Half of the tokens of each are hits."""
    stop = threading.Event()
    with session_of(sidecar, role=Role.SCHEDULER) as scheduler, session_of(sidecar) as worker:
        thread = threading.Thread(target=_run, args=(scheduler, worker, stop))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


def _run(scheduler: SidecarSession, worker: SidecarSession, stop: threading.Event) -> None:
    store(worker, 0)
    for number in itertools.count(1):
        if stop.wait(_PAUSE_SECONDS):
            return
        scheduled = Scheduled(
            num_hit_chunks=1, num_loaded_tokens=CHUNK_TOKENS, num_prompt_tokens=2 * CHUNK_TOKENS
        )
        scheduler.lookup(f"r{number}", [(0, make_keys(0, number))], hint=True, scheduled=scheduled)
        store(worker, number)
        scheduler.release([f"r{number}"])
