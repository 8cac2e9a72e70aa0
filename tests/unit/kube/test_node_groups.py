"""Control groups of the tests' node, in both cgroup versions, with folders in place of cgroup mounts."""

import pytest

from testing.node import groups

CONTAINER = "0123456789abcdef"


@pytest.fixture
def version_1(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    for name in ("cpu", "cpuset", "memory"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "cgroup.procs").touch()
    (tmp_path / "cpuset" / "cpuset.cpus").write_text("0-1")
    (tmp_path / "cpuset" / "cpuset.mems").write_text("0")
    (tmp_path / "cpu,cpuacct").symlink_to("cpu")
    return tmp_path


@pytest.fixture
def version_2(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory rdma misc")
    return tmp_path


def test_cgroup_v1_creates_a_group_in_each_hierarchy(version_1):
    groups.make("node")
    assert {path.name for path in groups.hierarchies()} == {"cpu", "cpuset", "memory"}
    assert all((path / "node").is_dir() for path in groups.hierarchies())
    assert (version_1 / "cpuset" / "node" / "cpuset.cpus").read_text() == "0-1"
    assert (version_1 / "cpuset" / "node" / "cpuset.mems").read_text() == "0"


def test_cgroup_v2_enables_the_available_controllers(version_2):
    groups.make("node")
    assert (version_2 / "cgroup.subtree_control").read_text() == "+cpu +cpuset +memory"
    assert (version_2 / "node" / "cpu.weight").read_text() == "400"


def test_machine_without_hierarchies_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "ROOT", tmp_path)
    with pytest.raises(OSError, match="no hierarchies"):
        groups.make("node")


def test_groups_are_removed_bottom_up(version_1):
    groups.make("other")
    (version_1 / "memory" / "node" / "pods" / CONTAINER).mkdir(parents=True)
    assert not groups.remove("node", itself=False)
    assert list((version_1 / "memory" / "node").iterdir()) == []
    assert groups.remove("node")
    assert (version_1 / "memory" / "other").exists()


@pytest.mark.parametrize(("version", "path"), [("version_1", "memory/node"), ("version_2", "node")])
def test_container_group_is_found_by_container_id(request, version, path):
    root = request.getfixturevalue(version)
    (root / path / "pods").mkdir(parents=True)
    (root / path / "pods" / CONTAINER).mkdir()
    assert groups.of_container("node", CONTAINER) == root / path / "pods" / CONTAINER
    for absent in ("fedcba", ""):
        with pytest.raises(FileNotFoundError):
            groups.of_container("node", absent)


def test_removed_group_is_empty(tmp_path):
    (tmp_path / "cgroup.procs").write_text("7\n")
    assert not groups.is_empty(tmp_path)
    (tmp_path / "cgroup.procs").write_text("")
    assert groups.is_empty(tmp_path)
    assert groups.is_empty(tmp_path / "gone")
