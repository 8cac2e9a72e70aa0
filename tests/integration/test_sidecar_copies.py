"""The sidecar copies stores from a simulated GPU, and reports why the engine copies if it cannot."""

import contextlib
import os
import re
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from testing.child_process import SOURCES, wait_until
from testing.cuda import GPU, MIG_SLICE, OTHER_GPU, Node, node
from testing.processes import SidecarProcess
from tests.harness.client import gpu_engine
from tests.harness.client.gpu_engine import GpuEngine, make_sidecar, new_engine

ROW = [5, 0, 23, 7]
OTHER_ROW = [1, 2, 3, 4]
COUNTERS = {
    "copied_slots", "copy_batches", "failed_slots", "started_readers", "failed_readers",
}  # fmt: skip


@pytest.fixture(scope="module")
def gpus() -> Iterator[Node]:
    with node() as present:
        yield present


@pytest.fixture(scope="module")
def shared_sidecar(gpus: Node) -> Iterator[SidecarProcess]:
    with make_sidecar(gpus) as present:
        yield present


@pytest.fixture
def sidecar(shared_sidecar: SidecarProcess) -> SidecarProcess:
    """A sidecar without clients and readers. It has rows of other tests."""
    shared_sidecar.wait_until(lambda stats: not stats["clients"])
    return shared_sidecar


@pytest.fixture(autouse=True)
def _alone(gpus: Node, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give each test a namespace, and check that all contexts are closed after its engines have left."""
    monkeypatch.setattr(gpu_engine, "NAMESPACE", os.urandom(32))
    yield
    with contextlib.suppress(unittest.SkipTest):  # a real GPU takes no orders and has no counters
        gpus.order("")
        wait_until(lambda: not gpus.processes(), what="all contexts are closed")


def transfer_of(sidecar: SidecarProcess) -> dict[str, Any]:
    (client,) = sidecar.stats()["clients"]
    transfer: dict[str, Any] = client["transfer"]
    return transfer


def test_sidecar_copies_the_content_of_the_gpu(gpus, sidecar):
    before = sidecar.stats()["transfer"]
    with GpuEngine(sidecar, gpus) as engine:
        engine.store_by_sidecar([1, 2], [ROW, OTHER_ROW])
        assert engine.ask("is_stored", 1, ROW)
        assert engine.ask("is_stored", 2, OTHER_ROW)
        engine.ask("fill", 99)
        assert not engine.ask("is_stored", 1, ROW)
        assert engine.ask("store", [3], [ROW]) == "stored"
        figures = sidecar.settled()["transfer"]
        counters = {name: number - before[name] for name, number in figures.items() if name in COUNTERS}
        assert counters == {
            "copied_slots": 3, "copy_batches": 2,
            "failed_slots": 0, "started_readers": 1, "failed_readers": 0,
        }  # fmt: skip
        assert GPU in figures["reason"]
        sidecar.wait_until(lambda stats: stats["transfer"]["pinned_bytes"]["reader"] > 0)
        assert figures["num_pin_failures"] == {"engine": 0, "reader": 0}
        assert (figures["asked"], figures["mode"], figures["pin_problem"]) == ("Auto", "CudaIPC", "")
        assert figures["num_workers"] == {"CudaIPC": 1, "SharedMemory": 0}
        assert figures["left_to_engines"] == before["left_to_engines"]
        assert transfer_of(sidecar)["mode"] == "CudaIPC"
        assert gpus.count("mappings", "reader") == 2
        assert gpus.count("pinned_bytes", "reader") > 0
        assert gpus.count("writes_to_imports") == 0


def test_ranks_on_one_gpu_share_a_reader(gpus, sidecar):
    before = sidecar.stats()["transfer"]
    with (
        GpuEngine(sidecar, gpus, num_columns=2, column=0, seed=1) as first,
        GpuEngine(sidecar, gpus, num_columns=2, column=1, seed=2) as second,
    ):
        for engine in (first, second):
            engine.wait_until_copied_by(sidecar=True)
        blocks = [list(range(start % 20, start % 20 + 4)) for start in range(60)]
        for engine in (first, second):
            engine.start_call("store", list(range(60)), blocks)
        assert [first.answer(), second.answer()] == ["stored", "stored"]
        for engine in (first, second):
            assert all(engine.ask("is_stored", key, blocks[key]) for key in (0, 31, 59))
        assert len(gpus.processes("reader")) == 1
        transfer = sidecar.stats()["transfer"]
        assert transfer["copied_slots"] - before["copied_slots"] == 120
        assert transfer["copy_batches"] - before["copy_batches"] <= 8, "slots must share batches"


def test_rows_of_different_groups_share_frames(gpus, sidecar):
    with GpuEngine(sidecar, gpus, num_groups=2) as engine:
        keys, rows = list(range(40)), [ROW if key % 3 else [key % 24] for key in range(40)]
        engine.store_by_sidecar(keys, rows)
        assert sidecar.stats()["geometry"]["slots_per_frame"] > 1, (
            "the test needs frames that several rows share"
        )
        assert all(engine.ask("is_stored", key, row) for key, row in zip(keys, rows, strict=True))


# ---- reasons against copies by the sidecar ----


@pytest.mark.parametrize(
    ("of_engine", "orders", "reason"),
    [
        ({"offered_gpu": OTHER_GPU}, "", "no NVIDIA GPU is visible here: .*by one resource claim for"),
        ({"claimed_blocks": 1 << 20}, "", "can't be opened: a layer of group 0 ends at byte .* of an alloc"),
        ({"refusal": "its memory is of the VMM kind"}, "", "its memory is of the VMM kind"),
        ({}, "reader: fail cuIpcOpenMemHandle_v2 1 201", r"cuIpcOpenMemHandle: .*\(201\): .*delete the pod"),
        (
            {},
            "reader: fail cuIpcOpenMemHandle_v2 1 1",
            r"cuIpcOpenMemHandle: .*\(1\): .*same GPU or MIG slice",
        ),
        (
            {},
            "reader: fail cuIpcOpenMemHandle_v2 1 801",
            r"cuIpcOpenMemHandle: .*\(801\): .*--transfer Shared",
        ),
        ({}, "reader: fail cuInit 1 803", r"no working CUDA driver: cuInit: .*\(803\): .*reboot the node"),
        ({}, "reader: fail cuIpcOpenMemHandle_v2 2 700", "cuIpcOpenMemHandle: .*700"),
    ],
)
def test_engine_copies_and_the_reason_is_reported(gpus, sidecar, of_engine, orders, reason):
    if orders:
        gpus.order(orders)
    check_left_to_the_engine(gpus, sidecar, reason, **of_engine)


@pytest.mark.parametrize(
    ("of_driver", "reason"),
    [
        ({"compute_mode": 3}, "CUDA_ERROR_DEVICE_UNAVAILABLE .*set its compute mode to Default"),
        ({"memory": 1 << 20, "context_bytes": 1 << 20}, "CUDA_ERROR_OUT_OF_MEMORY .*lower --gpu-memory-util"),
        (
            {"missing": "cuIpcOpenMemHandle"},
            "update the NVIDIA driver, or install a version of cuda-bindings",
        ),
    ],
)
def test_engine_copies_if_the_reader_gets_no_context(gpus, of_driver, reason):
    with make_sidecar(gpus, {"transfer": "CudaIPC"}, **of_driver) as sidecar:
        check_left_to_the_engine(gpus, sidecar, reason)
        assert sidecar.stats()["transfer"]["asked"] == "CudaIPC"


def check_left_to_the_engine(gpus: Node, sidecar: SidecarProcess, reason: str, **of_engine: Any) -> None:
    before = Counter(sidecar.stats()["transfer"]["left_to_engines"])
    with GpuEngine(sidecar, gpus, **of_engine) as engine:
        assert re.search(reason, engine.wait_until_copied_by(sidecar=False))
        assert re.search(f"engine copies: .*({reason})", engine.ask("store", [1], [ROW]))
        transfer = sidecar.stats()["transfer"]
        assert transfer["mode"] == "SharedMemory"
        assert re.search(reason, transfer["reason"])
        assert re.search(reason, transfer_of(sidecar)["reason"])
        ((counted, number),) = (Counter(transfer["left_to_engines"]) - before).items()
        assert re.search(reason, counted)
        assert number == 1
        assert 'lmcache_transfer_left_to_engines_total{reason="' in sidecar.get("/metrics")
        assert sidecar.get("/readyz") == "ready\n"


# ---- memory that CUDA cannot pin ----

NO_PINS = {"orders": "fail cuMemHostRegister_v2 * 2"}
ERROR = r"cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY \(2\): raise the limit of locked memory .*"


def test_pin_failures_of_the_reader_are_reported(gpus, sidecar):
    gpus.order(f"reader: {NO_PINS['orders']}")
    with GpuEngine(sidecar, gpus, copies=True) as engine:
        engine.store_by_sidecar([1], [ROW])
        assert engine.ask("is_stored", 1, ROW)

        def transfer():
            transfer = sidecar.stats()["transfer"]
            is_complete = transfer["num_pin_failures"]["reader"] and transfer["pinned_bytes"]["engine"]
            return transfer if is_complete else None

        reported = wait_until(transfer, what="both processes have reported their pins")
        assert reported["num_pin_failures"] == {"engine": 0, "reader": 1}
        assert reported["pinned_bytes"]["reader"] == 0
        problem = rf"the reader of {GPU} could not pin 1 parts of the memory tier: {ERROR}"
        assert re.fullmatch(problem, reported["pin_problem"])
        assert 'lmcache_transfer_pin_failures{process="reader"} 1.0' in sidecar.get("/metrics")


def test_pin_failures_of_an_engine_are_reported_by_client(gpus, sidecar):
    with GpuEngine(sidecar, gpus, copies=True, driver=NO_PINS) as engine:

        def pins():
            (client,) = sidecar.stats()["clients"]
            return client["pins"] if client["pins"] and client["pins"]["num_failures"] else None

        reported = wait_until(pins, what="the engine has reported its pins")
        assert (reported["pinned_bytes"], reported["num_failures"]) == (0, 1)
        assert re.fullmatch(ERROR, reported["problem"])
        problem = sidecar.stats()["transfer"]["pin_problem"]
        assert re.fullmatch(
            rf"the worker of column 0, pid {engine.pid}, could not pin 1 .*: {ERROR}", problem
        )
        engine.ask("attach_again")
        wait_until(lambda: len(sidecar.stats()["clients"]) == 1, what="the first client is removed")
        assert wait_until(pins, what="the next client has reported its pins")["num_failures"] == 1
    with GpuEngine(sidecar, gpus) as engine:
        engine.store_by_sidecar([1], [ROW])
        assert not sidecar.stats()["transfer"]["pin_problem"], "the pins of a client end with its stream"


def test_memory_that_is_not_pinned_is_copied_in_single_pieces(gpus):
    with make_sidecar(gpus, **NO_PINS) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.store_by_sidecar([1, 2], [ROW, OTHER_ROW])
        assert engine.ask("store", [3], [OTHER_ROW]) == "stored"
        for key, row in ((1, ROW), (2, OTHER_ROW), (3, OTHER_ROW)):
            assert engine.ask("is_stored", key, row)
        assert (gpus.count("batches", "reader"), gpus.count("refused_batches", "reader")) == (0, 0)
        assert gpus.count("single_copies", "reader")
        assert sidecar.stats()["transfer"]["failed_readers"] == 0


def test_engine_copies_without_the_driver_or_its_binding(gpus, tmp_path):
    gpus.order("")  # skips the test on a real driver, which can't be taken away
    with make_sidecar(gpus, None) as sidecar:
        sidecar.kill()
        del sidecar.environment["LD_LIBRARY_PATH"]
        sidecar.start()
        with GpuEngine(sidecar, gpus) as engine:
            assert "no working CUDA driver" in engine.wait_until_copied_by(sidecar=False)
        sidecar.kill()
        (tmp_path / "cuda").mkdir()
        (tmp_path / "cuda" / "__init__.py").write_text("raise ImportError('no module')")
        sidecar.environment["PYTHONPATH"] = f"{tmp_path}:{SOURCES}"
        sidecar.start()
        with GpuEngine(sidecar, gpus) as engine:
            assert "cuda-bindings is not installed" in engine.wait_until_copied_by(sidecar=False)


def test_transfer_shared_memory_starts_no_reader(gpus):
    with make_sidecar(gpus, {"transfer": "SharedMemory"}) as sidecar, GpuEngine(sidecar, gpus) as engine:
        assert "--transfer SharedMemory" in engine.wait_until_copied_by(sidecar=False)
        assert not gpus.processes("reader")


@pytest.mark.parametrize("of_driver", [{"driver_version": 12040}, {"no_host_pointers": 1}])
def test_driver_that_takes_no_batches_copies_piece_by_piece(gpus, of_driver):
    with make_sidecar(gpus, **of_driver) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.store_by_sidecar([1], [ROW])
        assert (gpus.count("batches", "reader"), gpus.count("single_copies", "reader")) == (0, 12)


def test_each_gpu_and_mig_slice_has_its_own_reader():
    devices = GPU, OTHER_GPU, MIG_SLICE
    with node(devices) as gpus, make_sidecar(gpus) as sidecar, contextlib.ExitStack() as stack:
        for key, gpu in enumerate(devices):
            engine = stack.enter_context(GpuEngine(sidecar, gpus, engine=new_engine(), gpu=gpu, seed=key))
            engine.store_by_sidecar([key], [ROW])
            assert engine.ask("is_stored", key, ROW)
            assert gpu in engine.wait_until_copied_by(sidecar=True)
        contexts = [[reader[f"contexts_on_{n}"] for n in range(3)] for reader in gpus.processes("reader")]
        assert sorted(contexts) == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]


# ---- process ids and handles ----


def test_handle_equal_to_that_of_a_dead_engine_is_opened_again(gpus, sidecar):
    """The driver reuses the address and the handle: an old mapping would show other KV."""
    gpus_of_engines = {"same_handles": 1}
    with GpuEngine(sidecar, gpus, driver=gpus_of_engines, engine=new_engine(), pid=77, seed=1) as dead:
        dead.wait_until_copied_by(sidecar=True)
        handles = dead.ask("handles")
        assert dead.ask("store", [1], [ROW]) == "stored"
        # The stream of the dead engine is still open: the sidecar has not noticed its death.
        with GpuEngine(sidecar, gpus, driver=gpus_of_engines, engine=new_engine(), pid=77, seed=2) as engine:
            assert engine.ask("handles") == handles, "the test needs equal handles"
            engine.store_by_sidecar([2], [ROW])
            assert engine.ask("is_stored", 2, ROW)
            wait_until(lambda: gpus.count("mappings", "reader") == 2)


def test_reader_ends_before_its_pinned_memory_is_released(gpus, tmp_path):
    size = tmp_path / "memory-size"
    size.write_text("16Mi")
    options = {"memory_max_size": "16Mi", "memory_size_file": size}
    with make_sidecar(gpus, options) as sidecar, GpuEngine(sidecar, gpus) as engine:
        engine.store_by_sidecar([1], [ROW])
        for key, text, num_readers in ((2, "4Mi", 2), (3, "16Mi", 2)):
            size.write_text(text)
            num_bytes = int(text[:-2]) << 20
            sidecar.wait_until(
                lambda stats, num_bytes=num_bytes: (
                    stats["memory"]["target_bytes"] == stats["memory"]["size_bytes"] == num_bytes
                )
            )
            engine.store_by_sidecar([key], [OTHER_ROW])
            assert engine.ask("is_stored", key, OTHER_ROW)
            assert sidecar.stats()["transfer"]["started_readers"] == num_readers
