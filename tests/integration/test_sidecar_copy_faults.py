"""Copies from a (simulated) GPU while something dies or hangs: no slot is reused too early, or never."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator

import pytest

from testing.child_process import wait_until
from testing.cuda import Node, node
from testing.processes import SidecarProcess
from tests.harness.gpu_engine import GpuEngine, make_sidecar, new_engine

ROW = [5, 0, 23, 7]
OTHER_ROW = [1, 2, 3, 4]
PATIENT = {"COPY_SECONDS": 120, "CLOSE_SECONDS": 120}
HASTY = {"COPY_SECONDS": 0.5, "CLOSE_SECONDS": 0.5}


@pytest.fixture
def gpus() -> Iterator[Node]:
    with node() as present:
        yield present


def reader_of(gpus: Node) -> int:
    (reader,) = gpus.processes("reader")
    return reader["pid"]


def open_descriptors(sidecar: SidecarProcess) -> int:
    return len(os.listdir(f"/proc/{sidecar.pid}/fd"))


def under_way(sidecar: SidecarProcess) -> int:
    number: int = sidecar.stats()["transfer"]["num_slots_under_way"]
    return number


def wait_for_copies(sidecar: SidecarProcess, number: int) -> None:
    sidecar.wait_until(lambda stats: stats["transfer"]["num_slots_under_way"] == number, timeout=60)


def start_stalled_store(
    gpus: Node, sidecar: SidecarProcess, engine: GpuEngine, timeout: float = 60.0
) -> None:
    engine.wait_until_copied_by(sidecar=True)
    gpus.order("reader: stall")
    engine.tell("store", [1], [ROW], timeout)
    wait_for_copies(sidecar, 1)


def test_a_slot_is_nobody_s_until_its_copy_ended_whatever_the_engine_says(gpus):
    with make_sidecar(gpus, {"memory_size": "1Mi"}, PATIENT) as sidecar, GpuEngine(sidecar, gpus) as engine:
        start_stalled_store(gpus, sidecar, engine, timeout=3.0)  # it must begin before
        assert engine.answer() == "SidecarUnavailableError", "and aborted"
        rows = sidecar.stats()["memory"]["usable_rows"]
        assert sidecar.stats()["memory"]["used_rows"] == under_way(sidecar) == 1
        assert engine.ask("fill_by_itself", rows + 5) == rows - 1, "all but the one that is being written"
        gpus.order("")
        wait_for_copies(sidecar, 0)
        assert engine.ask("fill_by_itself", rows + 5) == rows
        assert engine.ask("store", [1], [OTHER_ROW]) == "stored"
        assert engine.ask("is_stored", 1, OTHER_ROW)


@pytest.mark.parametrize("fault", ["killed", "frozen", "stalled"])
def test_a_reader_that_is_lost_in_mid_copy_leaves_copies_to_the_engine(gpus, fault):
    patch = PATIENT if fault == "killed" else HASTY
    with make_sidecar(gpus, None, patch) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.wait_until_copied_by(sidecar=True)
        reader = reader_of(gpus)
        gpus.order("reader: stall")
        engine.tell("store", [1, 2], [ROW, OTHER_ROW], 60.0)
        if fault == "killed":
            wait_for_copies(sidecar, 2)
            os.kill(reader, signal.SIGKILL)
        elif fault == "frozen":
            os.kill(reader, signal.SIGSTOP)
        reason = "its reader ended, signal 9" if fault == "killed" else "did not answer COPY within 0.5 s"
        assert re.search(f"engine copies: .*{reason}", engine.answer())
        assert reason in engine.wait_until_copied_by(sidecar=False)
        stats = sidecar.stats()
        assert (stats["transfer"]["failed_slots"], stats["transfer"]["failed_readers"]) == (2, 1)
        assert (under_way(sidecar), stats["memory"]["used_rows"]) == (0, 0)
        assert not gpus.processes("reader")
        gpus.order("")
        engine.ask("attach_again")  # as an engine that is restarted
        engine.store_by_sidecar([1], [ROW])


def test_a_reader_that_dies_between_copies_is_replaced(gpus):
    with make_sidecar(gpus) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.wait_until_copied_by(sidecar=True)
        first = reader_of(gpus)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: gpus.processes("reader") and reader_of(gpus) != first, timeout=60)
        engine.store_by_sidecar([1], [ROW])


def test_a_broken_context_is_one_engine_s_and_not_the_other_s(gpus):
    with (
        make_sidecar(gpus) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=1) as broken,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as other,
    ):
        for engine in (broken, other):
            engine.wait_until_copied_by(sidecar=True)
        gpus.order("reader: fail cuMemcpyBatchAsync * 700")
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in broken.ask("store", [1], [ROW])
        gpus.order("")
        other.store_by_sidecar([2], [ROW])
        assert "CUDA_ERROR_ILLEGAL_ADDRESS" in broken.wait_until_copied_by(sidecar=False)


def test_an_engine_that_dies_in_mid_copy_has_its_memory_closed(gpus):
    """Within the bound of a drain: a restarted engine needs the memory."""
    with (
        make_sidecar(gpus, None, HASTY) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine()) as other,
    ):
        other.wait_until_copied_by(sidecar=True)
        with GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as engine:
            start_stalled_store(gpus, sidecar, engine)
        wait_for_copies(sidecar, 0)
        gpus.order("")
        other.store_by_sidecar([2], [ROW])
        assert gpus.count("mappings", "reader") == 2
        sidecar.wait_until(lambda stats: stats["memory"]["quarantined_slots"] == 0, timeout=60)
        assert sidecar.stats()["memory"]["used_rows"] == 1


def test_memory_is_not_closed_under_a_copy_from_it(gpus):
    """That would break the context, and with it the copies of all engines on the GPU."""
    with (
        make_sidecar(gpus, None, PATIENT) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine()) as other,
    ):
        other.wait_until_copied_by(sidecar=True)
        with GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as engine:
            start_stalled_store(gpus, sidecar, engine)
        sidecar.wait_until(lambda stats: stats["num_clients"]["attached"] == 1, timeout=60)
        reader = reader_of(gpus)
        assert gpus.count("mappings", "reader") == 4
        gpus.order("")
        wait_until(lambda: gpus.count("mappings", "reader") == 2, timeout=60)
        wait_for_copies(sidecar, 0)
        other.store_by_sidecar([2], [ROW])
        assert reader_of(gpus) == reader
        assert sidecar.stats()["transfer"]["failed_readers"] == 0


def test_an_engine_that_leaves_has_its_memory_closed_and_no_more(gpus):
    with make_sidecar(gpus) as sidecar, GpuEngine(sidecar, gpus, engine=new_engine()) as stays:
        stays.wait_until_copied_by(sidecar=True)
        reader = reader_of(gpus)
        with GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as leaves:
            leaves.wait_until_copied_by(sidecar=True)
            assert gpus.count("mappings", "reader") == 4
        wait_until(lambda: gpus.count("mappings", "reader") == 2)
        assert reader_of(gpus) == reader
        assert stays.ask("store", [1], [ROW]) == "stored"


def test_a_sidecar_that_is_killed_in_mid_copy_takes_its_reader_along(gpus):
    with make_sidecar(gpus, None, PATIENT) as sidecar, GpuEngine(sidecar, gpus) as engine:
        start_stalled_store(gpus, sidecar, engine)
        reader = reader_of(gpus)
        os.kill(reader, signal.SIGSTOP)
        sidecar.kill()
        assert engine.answer().startswith("SidecarUnavailableError")
        wait_until(lambda: not gpus.processes("reader"), what="the kernel ends it with its parent")
        gpus.order("")
        sidecar.start()
        engine.ask("attach_again")
        engine.store_by_sidecar([1], [OTHER_ROW])
        assert engine.ask("is_stored", 1, OTHER_ROW)


def test_a_sidecar_that_stops_ends_its_reader(gpus):
    with make_sidecar(gpus, None, PATIENT) as sidecar, GpuEngine(sidecar, gpus) as engine:
        start_stalled_store(gpus, sidecar, engine)
        assert sidecar.terminate(timeout=60) == 0
        assert not gpus.processes("reader")
        assert engine.answer().startswith("SidecarUnavailableError")


def test_many_attaches_leave_nothing_behind(gpus):
    with (
        make_sidecar(gpus) as sidecar,
        GpuEngine(sidecar, gpus, engine=new_engine()) as stays,
        GpuEngine(sidecar, gpus, engine=new_engine(), seed=2) as engine,
    ):
        for each in (stays, engine):
            each.wait_until_copied_by(sidecar=True)
            assert each.ask("store", [1], [ROW]) in ("stored", "busy")
        before, descriptors = gpus.processes("reader"), open_descriptors(sidecar)
        assert engine.ask("attach_often", 20) == 20
        (after,) = wait_until(lambda: gpus.processes("reader"))
        names = ("pid", "contexts", "mappings", "streams", "events", "pins", "pinned_bytes")
        assert {name: after[name] for name in names} == {name: before[0][name] for name in names}
        sidecar.wait_until(
            lambda stats: stats["num_clients"] == {"attached": 2, "quarantined": 0}, timeout=60
        )
        assert open_descriptors(sidecar) < descriptors + 10, "some are of gRPC and HTTP"
