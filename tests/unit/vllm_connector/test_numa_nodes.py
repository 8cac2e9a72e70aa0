"""The columns and NUMA nodes of all ranks, as a worker tells them to the sidecar."""

from types import SimpleNamespace

import pytest

from lmcache_client.cuda.driver import Device
from lmcache_client.vllm import attach
from lmcache_client.vllm.places import RankPlace

ALL = range(4)


@pytest.mark.parametrize(
    ("nodes", "tensor", "stages", "replicas", "owners"),  # owners: ranks of each node that store
    [
        (1, 4, 1, 1, [[0, 1, 2, 3]]),
        (1, 2, 2, 2, [[0, 2]]),
        (2, 4, 1, 1, [[0, 1], [2, 3]]),
        (2, 4, 1, 4, [[0], [2]]),  # latents: no rank of the second node is a replica of the first node's
        (2, 8, 1, 2, [[0, 2], [4, 6]]),  # fewer KV heads than ranks
        (4, 8, 1, 8, [[0], [2], [4], [6]]),
        (3, 6, 1, 6, [[0], [2], [4]]),
        (2, 6, 1, 2, [[0, 2], [3, 4]]),  # the ranks of the second column are on both nodes
        (2, 2, 3, 1, [[0, 1, 2], [3, 4, 5]]),  # the second stage is on both nodes
        (2, 2, 3, 2, [[0, 2], [3, 4]]),
        (3, 2, 3, 2, [[0], [2], [4]]),  # a stage on each node
    ],
)
def test_each_node_stores_all_of_its_columns_once(nodes, tensor, stages, replicas, owners):
    size = tensor * stages
    for rank in range(size):
        part = rank // (size // nodes)
        for node in (part, part + 5 * nodes):  # of the first and of the sixth data-parallel rank
            sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "node_rank": node}
            backend = {"distributed_executor_backend": "mp", "nnodes_within_dp": nodes}
            place = RankPlace.of(SimpleNamespace(**sizes, **backend), rank, replicas)
            assert (place.part, place.num_parts) == (part, nodes)
            assert [part * place.num_ranks + owner for owner in place.owners] == owners[part]
            assert place.is_replica == (rank not in owners[part])
            assert place.column == sum(owner <= rank for owner in owners[part]) - 1
            assert len({number // replicas for number in owners[part]}) == len(owners[part])


def place_of(rank, owners):
    return RankPlace(0, 1, rank, owners.stop, tuple(owners))


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
    assert attach._numa_nodes(f"GPU-{gpu}", place_of(gpu % ranks.stop, ranks)) == expected


def test_nodes_are_unknown_if_the_ranks_use_other_gpus(monkeypatch):
    devices = [SimpleNamespace(uuid=f"GPU-{n}", numa_node=n) for n in range(4)]
    monkeypatch.setattr(Device, "visible", lambda: devices)
    assert attach._numa_nodes("GPU-2", place_of(0, ALL)) == ()


def test_engine_on_a_cpu_names_no_nodes(monkeypatch):
    monkeypatch.setattr(Device, "visible", lambda: pytest.fail("there is no driver"))
    assert attach._numa_nodes("", place_of(0, range(1))) == ()
