"""The NUMA nodes of the GPUs of all ranks, as a worker tells them to the sidecar."""

from types import SimpleNamespace

import pytest

from lmcache_client.cuda.driver import Device
from lmcache_client.vllm import attach

ALL = range(4)


@pytest.mark.parametrize(
    ("nodes", "gpu", "ranks", "expected"),
    [
        ([0, 0, 1, 1], 2, ALL, (0, 0, 1, 1)),
        ([0, 0, 1, 1], 0, range(0, 4, 2), (0, 1)),  # two replicas of each column
        ([0, 0, 1, 1], 3, range(0, 4, 2), (0, 1)),  # a replica
        ([0, None, 1, 1], 0, ALL, ()),  # the host does not say
        ([0], 0, range(2), ()),  # each rank sees its own GPU only
        ([0, 0, 1, 1, 1], 0, range(1), (0,)),
        ([0, 0, 1, 0], 3, range(2), (1, 0)),  # the second data-parallel rank
        ([0, 0, 1, 0], 2, range(0, 2, 2), (1,)),
        ([0, 0, 0, 0, 1], 4, ALL, ()),  # its other GPUs are not visible
    ],
)
def test_node_of_each_column_is_that_of_its_rank(nodes, gpu, ranks, expected, monkeypatch):
    devices = [SimpleNamespace(uuid=f"GPU-{n}", numa_node=node) for n, node in enumerate(nodes)]
    monkeypatch.setattr(Device, "visible", lambda: devices)
    assert attach._numa_nodes(f"GPU-{gpu}", gpu % ranks.stop, ranks) == expected


def test_nodes_are_unknown_if_the_ranks_use_other_gpus(monkeypatch):
    devices = [SimpleNamespace(uuid=f"GPU-{n}", numa_node=n) for n in range(4)]
    monkeypatch.setattr(Device, "visible", lambda: devices)
    assert attach._numa_nodes("GPU-2", 0, ALL) == ()


def test_engine_on_a_cpu_names_no_nodes(monkeypatch):
    monkeypatch.setattr(Device, "visible", lambda: pytest.fail("there is no driver"))
    assert attach._numa_nodes("", 0, range(1)) == ()
