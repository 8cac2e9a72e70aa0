"""A bundle from the registry's packages runs on a machine without network, on the simulated driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testing.child_process import REPOSITORY
from testing.cuda import Node
from tools.gpu_bundle import lists

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
FOLDERS = ("benchmarks", "lmcache", "operator", "sidecar", "testing", "tests", "tools", "pyproject.toml")
MODULES = {"cryptography": "cryptography", "pytest-timeout": "pytest_timeout", "redis": "redis"}
"""Modules of packages that the machine lacks in this test."""
IMPORT = "import importlib, sys; print(*(importlib.import_module(name).__file__ for name in sys.argv[1:]))"


@pytest.fixture
def tree(tmp_path) -> Path:
    """A copied checkout with a bundle for the Python of the tests."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for name in FOLDERS:
        (tree / name).symlink_to(REPOSITORY / name)
    argv = ["--python", PYTHON, "--machine", lists.FOLDER / "minimal.txt", "--output", tree / ".gpu"]
    packing = [sys.executable, "-m", "tools.gpu_bundle", *map(str, argv)]
    done = subprocess.run(packing, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tree


def without_network(*argv: str | Path) -> list[str]:
    """Return a command that runs in a network namespace with no interface that is up."""
    prefix = ["unshare", "--net", *([] if os.getuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no network namespaces")
    return [*prefix, *map(str, argv)]


def test_bundle_runs_without_network(tree, tmp_path):
    environment = tmp_path / "environment"
    variables = {"OUT": str(tmp_path / "out"), "PYTHON": sys.executable, "GPU_ENVIRONMENT": str(environment)}
    node = Node(tmp_path / "node").environment()
    argv = without_network("sh", tree / ".gpu" / "run.sh", "--simulated", "facts")
    done = subprocess.run(argv, cwd="/", env=os.environ | variables | node, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    step = json.loads((tmp_path / "out" / "results.jsonl").read_text())
    assert (step["step"], step["state"]) == ("facts", "passed")

    packed = {
        package.name
        for package in lists.choose(lists.installed(lists.FOLDER / "minimal.txt"), with_vllm=False).packed
    }
    assert set(MODULES) <= packed
    python = environment / "bin" / "python"
    paths = subprocess.check_output([python, "-c", IMPORT, *MODULES.values()], cwd="/", text=True).split()
    assert all(Path(path).is_relative_to(environment) for path in paths), paths
