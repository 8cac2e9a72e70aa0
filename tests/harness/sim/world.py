"""Simulated engines on one real sidecar, gates that hold copies back, and an auditor of the arena."""

import itertools
import os
import random
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest
from vllm.distributed.kv_transfer import kv_transfer_state

from lmcache_client.core.copier import CpuCopier
from lmcache_client.core.cuda_copier import CudaCopier
from lmcache_client.core.worker import WorkerSide
from lmcache_client.rpc.session import SidecarSession
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.sim.config import CHUNK, SimSettings
from tests.harness.sim.engine import SimEngine

_SEEDS = itertools.count()

TRANSFERS = ["CudaIPC", "SharedMemory"] if "CUDASIM_NODE" in os.environ else ["Auto"]
"""Transfer modes to test. With KV in memory of the simulated GPU, the sidecar or the engine copies stores."""


def make_tokens(num_tokens: int, seed: object = None) -> list[int]:
    """Random tokens. Without a seed, no other call returns the same tokens."""
    generator = random.Random(f"new {next(_SEEDS)}" if seed is None else f"{seed}")
    return [generator.randrange(4, 254) for _ in range(num_tokens)]


class Gate:
    """Copies wait at the gate while it is shut."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_open = True
        self.num_waiting = 0

    def gated(self, copy):
        """The same copy function, behind this gate."""

        def wait_and_copy(*args, **kwargs):
            with self._changed:
                self.num_waiting += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._is_open, 60)
            try:
                return copy(*args, **kwargs)
            finally:
                with self._changed:
                    self.num_waiting -= 1
                    self._changed.notify_all()

        return wait_and_copy

    def shut(self) -> None:
        self._is_open = False

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def wait_arrived(self) -> None:
        """Wait until a copy waits at the gate."""
        with self._changed:
            assert self._changed.wait_for(lambda: self.num_waiting, 60), "no copy arrived"


class SimWorld:
    """One sidecar with simulated engines. The gates hold copies of all engines. ``settings`` are defaults.

    If these engines have several parts, ``further`` are the sidecars of the parts after the first one.
    Engines wait until all memory of the sidecar can be used, unless ``is_large``.
    """

    def __init__(
        self,
        sidecar: SidecarProcess,
        settings: SimSettings = SimSettings(),  # noqa: B008
        *,
        further: Sequence[SidecarProcess] = (),
        is_large: bool = False,
    ) -> None:
        self.sidecar, self.settings, self._is_large = sidecar, settings, is_large
        self.sidecars = [sidecar, *further]
        self.load_gate, self.store_gate = Gate(), Gate()
        self._engines: list[SimEngine] = []
        self._auditors: dict[SimSettings, SimEngine] = {}
        self._gated = pytest.MonkeyPatch()
        for copier in CpuCopier, CudaCopier:
            self._gated.setattr(copier, "load", self.load_gate.gated(copier.load))
            self._gated.setattr(copier, "store", self.store_gate.gated(copier.store))
        self._gated.setattr(SidecarSession, "copy_blocks", self.store_gate.gated(SidecarSession.copy_blocks))

    @contextmanager
    def engines(self, *settings: SimSettings):
        """Attached engines. At the end the gates are opened and the engines closed."""
        engines = []
        try:
            for wanted in settings:
                engines.append(self._start(wanted))
            for engine in engines:
                wait_attached(engine)
                if self.sidecar.options.get("transfer") == "CudaIPC":
                    wait_copied_for(engine)
            if engines and not self._is_large:
                for sidecar in self.sidecars:
                    sidecar.wait_usable()
            yield engines
        finally:
            self.open_gates()
            for engine in engines:
                engine.close()

    def open_gates(self) -> None:
        self.load_gate.open()
        self.store_gate.open()

    def audit(self, settings: SimSettings, prompts: Iterable[Sequence[int]]) -> int:
        """Load all cached KV of these tokens into a separate engine, and compare it with the expected KV.

        Returns the number of cached tokens. Raises AssertionError. No store may be in progress: KV that is
        committed later is not checked.
        """
        auditor = self._auditor(settings)
        names = []
        for prompt in prompts:
            names.append(auditor.add(prompt))
            auditor.run()
            auditor.forget()
        wrong, auditor.wrong_reads = auditor.wrong_reads, []
        assert not wrong, f"committed under a wrong name: {wrong}"
        return sum(auditor.results[name].num_cached_tokens for name in names)

    def close(self) -> None:
        for auditor in self._auditors.values():
            auditor.close()
        kv_transfer_state._KV_CONNECTOR_AGENT = None
        self._gated.undo()

    def _start(self, settings: SimSettings) -> SimEngine:
        sockets = [sidecar.socket_path for sidecar in self.sidecars[: settings.num_parts]]
        return SimEngine(sockets[0], settings, sockets[1:])

    def _auditor(self, settings: SimSettings) -> SimEngine:
        wanted = SimSettings(
            num_drafts=settings.num_drafts,
            num_blocks=256,
            head_size=settings.head_size,
            groups=settings.groups,
            has_prefix_caching=settings.has_states,  # states need prefix caching
            tensor_parallel=settings.tensor_parallel,
            num_kv_heads=settings.num_kv_heads,
            pipeline_parallel=settings.pipeline_parallel,
            num_parts=settings.num_parts,
        )
        if wanted not in self._auditors:
            self._auditors[wanted] = self._start(wanted)
            wait_attached(self._auditors[wanted])
        return self._auditors[wanted]


@pytest.fixture(scope="module", params=TRANSFERS)
def world(request):
    with serving_world(transfer=request.param) as world:
        yield world


@contextmanager
def serving_world(settings: SimSettings = SimSettings(), *, is_large: bool = False, **options: object):  # noqa: B008
    """A sidecar with these options for each part of an engine, without engines."""
    with ExitStack() as stack:
        sidecars = [stack.enter_context(SidecarProcess(**options)) for _ in range(settings.num_parts)]
        world = SimWorld(sidecars[0], settings, further=sidecars[1:], is_large=is_large)
        yield stack.enter_context(closing(world))


@contextmanager
def only_engine(settings: SimSettings, **options: object):
    """A sidecar of its own with these options, and its only engine."""
    with serving_world(settings, **options) as world, world.engines(settings) as (engine,):
        yield world.sidecar, engine


def assert_idle(engine: SimEngine) -> None:
    """Check that nothing is in progress, all blocks are free, and all reads were right."""
    engine.run()
    engine.forget()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == engine.settings.num_blocks - 1
    assert not engine.wrong_reads, engine.wrong_reads


def wait_attached(engine: SimEngine) -> None:
    """Wait until the engine hits chunks that it stored."""
    prompt = make_tokens(CHUNK + 1)
    wait_until(lambda: engine.results[engine.serve(prompt)].num_cached_tokens == CHUNK, what="a hit")


def wait_reported(engine: SimEngine) -> None:
    """Wait until the sidecar has all reports of the engine, with the times of its requests."""
    done, lookups = threading.Event(), engine.scheduler.connector._scheduler._lookups
    lookups._queue.put(lookups._send_times)
    lookups._queue.put(done.set)
    assert done.wait(60)


def wait_copied_for(engine: SimEngine) -> None:
    """Wait until the sidecar copies the stores of all ranks that store."""

    def is_copied_for(worker: WorkerSide) -> bool:
        session = worker._client.session
        return worker.identity.is_replica or (session is not None and session.store_copier.is_sidecar)

    workers = [rank.worker._worker for rank in engine.ranks]
    wait_until(lambda: all(map(is_copied_for, workers)), timeout=60, what="the sidecar reads the GPU")
