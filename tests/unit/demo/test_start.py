"""Start of the demo: printed times, and programs to build."""

import subprocess
import sys

import pytest

from demo import start
from testing.child_process import REPOSITORY
from testing.kube import cluster
from tools.kube import binaries, machine


@pytest.fixture
def set_missing_programs(monkeypatch):
    """Simulate that these programs are missing."""

    def set_missing(*names: str) -> None:
        monkeypatch.setattr(machine, "missing", lambda _: list(names))

    return set_missing


def test_demo_builds_only_programs_of_its_control_plane():
    assert set(binaries.CLUSTER) == set(cluster.Cluster.programs)
    assert not {"kubelet", "kube-proxy", "kubeconform"} & set(binaries.CLUSTER)


def test_expected_time_is_in_seconds_if_nothing_is_missing(set_missing_programs):
    set_missing_programs()
    assert start.expected(start.HALVES, is_set_up=True) == "This takes about 90 seconds."
    assert start.expected(["engine"], is_set_up=True) == "This takes about 65 seconds."


def test_expected_time_includes_build_and_set_up(set_missing_programs):
    set_missing_programs("kwok", "helm")
    text = start.expected(start.HALVES, is_set_up=False)
    assert "7 minutes this first time, later 90 seconds" in text
    assert "built from source in the background (kwok, helm)" in text
    assert str(binaries.cache_directory().parent) in text
    assert "downloaded and installed" in text


def test_engine_half_needs_no_build(set_missing_programs):
    set_missing_programs("kwok")
    assert "Kubernetes" not in start.expected(["engine"], is_set_up=False)


def test_demo_starts_before_packages_are_installed():
    """``-S`` and ``-I`` leave only the standard library."""
    argv = [sys.executable, "-S", "-I", "-c", "import sys; sys.path.insert(0, '.'); import demo.start"]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
