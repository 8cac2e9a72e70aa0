"""Start of the demo: printed times, and programs to build."""

import subprocess
import sys

from testing.child_process import REPOSITORY
from testing.kube import cluster
from tools.kube import binaries


def test_demo_builds_only_programs_of_its_control_plane():
    assert set(binaries.CLUSTER) == set(cluster.Cluster.programs)
    assert not {"kubelet", "kube-proxy", "kubeconform"} & set(binaries.CLUSTER)


def test_demo_starts_before_packages_are_installed():
    """``-S`` and ``-I`` leave only the standard library."""
    argv = [sys.executable, "-S", "-I", "-c", "import sys; sys.path.insert(0, '.'); import demo.start"]
    subprocess.run(argv, cwd=REPOSITORY, check=True)
