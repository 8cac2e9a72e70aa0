"""What the demo says and builds at its start."""

import subprocess
import sys

import pytest

from demo import start
from testing.child_process import REPOSITORY
from testing.kube import cluster
from tools.kube import binaries, machine


@pytest.fixture
def lacks(monkeypatch):
    """Make it look as if these programs were missing."""

    def set_missing(*names: str) -> None:
        monkeypatch.setattr(machine, "missing", lambda _: list(names))

    return set_missing


def test_it_builds_the_programs_of_its_control_plane_and_no_more():
    assert set(binaries.CLUSTER) == set(cluster.Cluster.programs)
    assert not {"kubelet", "kube-proxy", "kubeconform"} & set(binaries.CLUSTER)


def test_where_all_is_there_it_names_seconds(lacks):
    lacks()
    assert start.expected(start.HALVES, is_set_up=True) == "This takes about 90 seconds."
    assert start.expected(["engine"], is_set_up=True) == "This takes about 65 seconds."


def test_a_build_and_set_up_are_named_with_their_time(lacks):
    lacks("kwok", "helm")
    text = start.expected(start.HALVES, is_set_up=False)
    assert "7 minutes this first time, later 90 seconds" in text
    assert "built from source in the background (kwok, helm)" in text
    assert str(binaries.cache_directory().parent) in text
    assert "downloaded and installed" in text


def test_the_engine_alone_needs_no_build(lacks):
    lacks("kwok")
    assert "Kubernetes" not in start.expected(["engine"], is_set_up=False)


def test_it_starts_before_anything_is_installed():
    """``-S`` and ``-I``: the standard library alone."""
    argv = [sys.executable, "-S", "-I", "-c", "import sys; sys.path.insert(0, '.'); import demo.start"]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
