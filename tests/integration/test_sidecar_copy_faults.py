"""Copies from a simulated GPU while a process dies or hangs: slots are reused, and never too early."""

import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from testing.child_process import wait_until
from testing.cuda import Node, node
from testing.deadlines import PATIENT
from testing.processes import SidecarProcess
from tests.harness.client.gpu_engine import GpuEngine, make_sidecar, new_engine

ROW = [5, 0, 23, 7]
OTHER_ROW = [1, 2, 3, 4]
HASTY = "copy_seconds=0.5,reader_close_seconds=0.5"


@pytest.fixture
def gpus() -> Iterator[Node]:
    with node() as present:
        yield present


def reader_of(gpus: Node) -> int:
    (reader,) = gpus.processes("reader")
    return reader["pid"]


def open_descriptors(sidecar: SidecarProcess) -> int:
    return len(os.listdir(f"/proc/{sidecar.pid}/fd"))


def num_slots_under_way(sidecar: SidecarProcess) -> int:
    number: int = sidecar.stats()["transfer"]["num_slots_under_way"]
    return number


def wait_for_copies(sidecar: SidecarProcess, number: int) -> None:
    sidecar.wait_until(lambda stats: stats["transfer"]["num_slots_under_way"] == number)


def wait_pinned(sidecar: SidecarProcess) -> None:
    """Wait until the reader has registered the arena with CUDA. It copies in batches from then on."""

    def is_pinned(stats: dict[str, Any]) -> bool:
        num_bytes: int = stats["transfer"]["pinned_bytes"]["reader"]
        return num_bytes == stats["memory"]["capacity_bytes"]

    sidecar.wait_until(is_pinned)


def start_stalled_store(
    gpus: Node, sidecar: SidecarProcess, engine: GpuEngine, timeout: float = 60.0
) -> None:
    engine.wait_until_copied_by(sidecar=True)
    gpus.order("reader: stall")
    engine.start_call("store", [1], [ROW], timeout)
    wait_for_copies(sidecar, 1)


def test_slot_is_not_reused_before_its_copy_ends(gpus):
    with make_sidecar(gpus, {"memory_size": "1Mi"}) as sidecar, GpuEngine(sidecar, gpus) as engine:
        start_stalled_store(gpus, sidecar, engine, timeout=3.0)  # real time: the copy hangs
        assert engine.answer() == "SidecarUnavailableError", "the engine must give up and abort"
        sidecar.wait_usable()
        rows = sidecar.stats()["memory"]["usable_rows"]
        assert sidecar.stats()["memory"]["used_rows"] == num_slots_under_way(sidecar) == 1
        assert engine.ask("fill_by_itself", rows + 5) == rows - 1, "the slot under copy must not be reused"
        gpus.order("")
        wait_for_copies(sidecar, 0)
        assert engine.ask("fill_by_itself", rows + 5) == rows
        sidecar.settled()  # no row can be evicted before the sidecar has its checksum
        assert engine.ask("store", [1], [OTHER_ROW]) == "stored"
        assert engine.ask("is_stored", 1, OTHER_ROW)


@pytest.mark.parametrize("fault", ["killed", "frozen", "stalled"])
def test_engine_copies_after_its_reader_failed_during_a_copy(gpus, fault):
    timing = PATIENT if fault == "killed" else HASTY
    with make_sidecar(gpus, None, timing) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.wait_until_copied_by(sidecar=True)
        reader = reader_of(gpus)
        gpus.order("reader: stall")
        engine.start_call("store", [1, 2], [ROW, OTHER_ROW], 60.0)
        if fault == "killed":
            wait_for_copies(sidecar, 2)
            os.kill(reader, signal.SIGKILL)
        elif fault == "frozen":
            os.kill(reader, signal.SIGSTOP)
        reason = "ended by signal 9" if fault == "killed" else "did not answer COPY within 0.5 s"
        assert re.search(f"engine copies: .*{reason}", engine.answer())
        assert reason in engine.wait_until_copied_by(sidecar=False)
        stats = sidecar.stats()
        assert (stats["transfer"]["failed_slots"], stats["transfer"]["failed_readers"]) == (2, 1)
        assert (num_slots_under_way(sidecar), stats["memory"]["used_rows"]) == (0, 0)
        assert not gpus.processes("reader")
        gpus.order("")
        engine.ask("attach_again")  # like a restarted engine
        engine.store_by_sidecar([1], [ROW])


def test_broken_context_affects_only_one_engine(gpus):
    with (
        make_sidecar(gpus) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=1) as broken,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as healthy,
    ):
        for engine in (broken, healthy):
            engine.wait_until_copied_by(sidecar=True)
        wait_pinned(sidecar)
        gpus.order("reader: fail cuMemcpyBatchAsync * 700")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in broken.ask("store", [1], [ROW])
        gpus.order("")
        healthy.store_by_sidecar([2], [ROW])
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in broken.wait_until_copied_by(sidecar=False)


def test_memory_is_not_closed_during_a_copy(gpus):
    """Closing the memory would break the context, and with it the copies of all engines on the GPU."""
    with make_sidecar(gpus) as sidecar, GpuEngine(sidecar, gpus, engine=new_engine()) as survivor:
        survivor.wait_until_copied_by(sidecar=True)
        with GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as engine:
            start_stalled_store(gpus, sidecar, engine)
        sidecar.wait_until(lambda stats: stats["num_clients"]["attached"] == 1)
        reader = reader_of(gpus)
        assert gpus.count("mappings", "reader") == 4
        gpus.order("")
        wait_until(lambda: gpus.count("mappings", "reader") == 2)
        wait_for_copies(sidecar, 0)
        survivor.store_by_sidecar([2], [ROW])
        assert reader_of(gpus) == reader
        assert sidecar.stats()["transfer"]["failed_readers"] == 0


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "terminated"])
def test_reader_ends_with_its_sidecar(gpus, is_killed):
    with make_sidecar(gpus) as sidecar, GpuEngine(sidecar, gpus) as engine:
        start_stalled_store(gpus, sidecar, engine)
        reader = reader_of(gpus)
        if is_killed:
            os.kill(reader, signal.SIGSTOP)
            sidecar.kill()
        else:
            assert sidecar.terminate(timeout=60) == 0
            assert not gpus.processes("reader")
        assert engine.answer().startswith("SidecarUnavailableError")
        wait_until(lambda: not gpus.processes("reader"), what="the kernel ends the reader with its parent")
        gpus.order("")
        sidecar.start()
        engine.ask("attach_again")
        engine.store_by_sidecar([1], [OTHER_ROW])
        assert engine.ask("is_stored", 1, OTHER_ROW)


def test_repeated_attaches_leak_nothing(gpus):
    with (
        make_sidecar(gpus) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine()) as remaining,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as engine,
    ):
        for key, gpu_engine in enumerate((remaining, engine)):
            gpu_engine.store_by_sidecar([key], [ROW])
        wait_pinned(sidecar)
        (before,), descriptors = gpus.processes("reader"), open_descriptors(sidecar)
        for key in range(100, 120):
            engine.ask("attach_again")
            engine.store_by_sidecar([key], [ROW])
        (after,) = wait_until(lambda: gpus.processes("reader"))
        names = ("pid", "contexts", "mappings", "streams", "events", "pins", "pinned_bytes")
        assert {name: after[name] for name in names} == {name: before[name] for name in names}
        sidecar.wait_until(lambda stats: stats["num_clients"] == {"attached": 2, "quarantined": 0})
        assert open_descriptors(sidecar) < descriptors + 10, "gRPC and HTTP may open some"
