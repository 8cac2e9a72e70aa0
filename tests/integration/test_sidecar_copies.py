"""The sidecar copies stores from a (simulated) GPU: what comes out, and who copies when it can't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from testing.cuda import Node, node
from testing.processes import SidecarProcess
from tests.harness.gpu_engine import BLOCKS_PER_ROW, GpuEngine

ROW = [5, 0, 23, 7]
OTHER_ROW = [1, 2, 3, 4]


@pytest.fixture
def gpus() -> Iterator[Node]:
    with node() as present:
        yield present


def make_sidecar(gpus: Node, **settings: object) -> SidecarProcess:
    """Its readers find the simulated driver; ``settings`` are theirs."""
    sidecar = SidecarProcess(memory_size="16Mi")
    sidecar.environment = gpus.environment("reader", **settings)
    return sidecar


@pytest.fixture
def sidecar(gpus: Node) -> Iterator[SidecarProcess]:
    with make_sidecar(gpus) as present:
        yield present


def test_what_the_sidecar_copies_is_what_the_gpu_has(gpus, sidecar):
    with GpuEngine(sidecar, gpus) as engine:
        assert gpus.devices[0] in engine.wait_until_copied_by(sidecar=True)
        assert engine.ask("store", [1, 2], [ROW, OTHER_ROW]) == "stored"
        assert engine.ask("is_stored", 1, ROW)
        assert engine.ask("is_stored", 2, OTHER_ROW)
        engine.ask("fill", 99)
        assert not engine.ask("is_stored", 1, ROW)
        assert engine.ask("store", [3], [ROW]) == "stored"
        stats = sidecar.stats()
        assert stats["transfer"] | {"reason": ""} == {
            "asked": "Auto", "mode": "CudaIPC", "reason": "",
            "num_workers": {"CudaIPC": 1, "SharedMemory": 0}, "num_slots_under_way": 0,
            "copied_slots": 3, "copied_bytes": 3 * BLOCKS_PER_ROW * 3 * 4096, "copy_batches": 2,
            "failed_slots": 0, "started_readers": 1, "failed_readers": 0,
        }  # fmt: skip
        assert gpus.count("mappings", "reader") == 2
        assert gpus.count("writes_to_imports") == 0
