"""Memory of an arena on chosen NUMA nodes, which are simulated: each has half of this host's cores."""

import os

import numpy as np
import pytest

from lmcache_store.common import numa
from lmcache_store.tiers.errors import ArenaError
from lmcache_store.tiers.memory import kernel_pages as pages
from lmcache_store.tiers.memory.arena import ArenaFile
from lmcache_store.tiers.memory.contracts import Geometry
from tests.harness.tiers.arenas import Growing, shm_path
from tests.unit.tiers.test_arena_resize import CAPACITY, GEOMETRY, MIB

__all__ = ["shm_path"]

CORES = sorted(os.sched_getaffinity(0))
FAR = 1023
"""A core that no process may use."""


@pytest.fixture
def nodes(tmp_path, monkeypatch):
    """Nodes 0 and 1 with half of this host's cores each, and node 3 with a core that can't be used."""
    if len(CORES) < 2:
        pytest.skip("this host has one core")
    half = len(CORES) // 2
    nodes = {0: CORES[:half], 1: CORES[half:], 3: [FAR]}
    (tmp_path / "has_memory").write_text("0-1,3\n")
    for node, cores in nodes.items():
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cores)) + "\n")
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    return nodes


@pytest.fixture
def taken(monkeypatch):
    """The cores on which each part of an arena was populated, by the part's address."""
    taken = {}
    populate = pages.populate

    def note(memory):
        taken[memory.ctypes.data] = os.sched_getaffinity(0)
        populate(memory)

    monkeypatch.setattr(pages, "populate", note)
    return taken


@pytest.fixture
def growing(shm_path, nodes):
    growing = Growing(shm_path / "arena", CAPACITY)
    yield growing
    growing.arena.close()


def fill(growing):
    """Take all memory, as before the first engine attaches."""
    growing.arena.start(growing.note_change)
    growing.wait_for(lambda: not growing.arena.num_pending_rows)


def cores_of_columns(growing, taken):
    """The cores on which each column was populated."""
    arena = growing.arena
    start = np.frombuffer(arena.view(0, 0), np.uint8).ctypes.data - arena.column_offset(0)
    bounds = [start + arena.column_offset(column) for column in range(arena.geometry.num_columns)]
    cores = [set() for _ in bounds]
    for address, used in taken.items():
        column = int(np.searchsorted(bounds, address, "right")) - 1
        if column >= 0:
            cores[column] |= used
    return cores


def test_thread_runs_on_the_node_and_then_as_before(nodes):
    for node, cores in ((0, nodes[0]), (1, nodes[1]), (3, CORES), (7, CORES), (None, CORES)):
        with numa.on_node(node):
            assert os.sched_getaffinity(0) == set(cores)
        assert os.sched_getaffinity(0) == set(CORES)
    with pytest.raises(KeyError), numa.on_node(1):
        raise KeyError
    assert os.sched_getaffinity(0) == set(CORES)


@pytest.mark.parametrize(
    ("node", "problem"), [(2, "no NUMA node 2; the nodes are 0, 1, 3"), (3, "may use no core of NUMA node 3")]
)
def test_node_that_can_not_be_used_is_refused_before_a_file_exists(nodes, shm_path, node, problem):
    with pytest.raises(ArenaError, match=problem):
        ArenaFile(shm_path / "arena", CAPACITY, numa_node=node)
    assert not (shm_path / "arena").exists()


def test_host_without_nodes_has_no_effect(tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "_NODES", tmp_path)
    assert not numa.may_be_elsewhere(0)
    with numa.on_node(0):
        assert os.sched_getaffinity(0) == set(CORES)
    with pytest.raises(ArenaError, match="the nodes are none"):
        pages.check_node(0)


def test_each_column_is_taken_on_the_node_of_its_gpu(growing, nodes, taken):
    fill(growing)
    taken.clear()
    growing.arena.format(GEOMETRY, [1, 0])
    growing.grow_to(growing.arena.num_rows)
    assert cores_of_columns(growing, taken) == [set(nodes[1]), set(nodes[0])]
    assert growing.taken_bytes() > CAPACITY - MIB


def test_columns_of_unknown_gpus_keep_their_memory(growing, taken):
    fill(growing)
    taken.clear()
    growing.arena.format(GEOMETRY)
    growing.grow_to(growing.arena.num_rows)
    assert all(len(cores) in (0, len(CORES)) for cores in cores_of_columns(growing, taken))


@pytest.mark.parametrize("is_chosen", [True, False])
def test_memory_that_lies_right_is_not_taken_again(nodes, shm_path, taken, is_chosen):
    """Memory lies right if the user chose the node, or if this process runs on the node only."""
    os.sched_setaffinity(0, CORES if is_chosen else nodes[1])
    try:
        growing = Growing(shm_path / "arena", CAPACITY, **({"numa_node": 1} if is_chosen else {}))
        fill(growing)
        assert all(cores == set(nodes[1]) for cores in taken.values())
        taken.clear()
        growing.arena.format(Geometry(64 << 10, 1), [0 if is_chosen else 1])
        growing.grow_to(growing.arena.num_rows)
        assert not taken
        growing.arena.close()
    finally:
        os.sched_setaffinity(0, CORES)


def test_later_growth_is_on_the_node_too(growing, nodes, taken):
    growing.arena.resize(CAPACITY // 4)
    growing.arena.format(GEOMETRY)
    growing.arena.start(growing.note_change)
    growing.grow_to(growing.arena.rows_within(CAPACITY // 4))
    taken.clear()
    growing.arena.column_nodes = [0, 1]  # an engine attaches to an arena that an earlier sidecar left
    growing.arena.resize(CAPACITY)
    growing.grow_to(growing.arena.num_rows)
    assert cores_of_columns(growing, taken) == [set(nodes[0]), set(nodes[1])]


def test_nodes_may_become_unknown_while_memory_is_taken(growing, nodes, taken):
    """An engine whose data-parallel ranks name different nodes attaches meanwhile."""

    class Forgotten(list):
        def __len__(self):
            growing.arena.column_nodes = ()
            return super().__len__()

    growing.arena.format(GEOMETRY)
    growing.arena.column_nodes = Forgotten([1, 1])
    fill(growing)
    assert growing.arena.growth_error is None
    assert set(nodes[1]) in taken.values()
