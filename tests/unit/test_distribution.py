"""Distribution of test files over pytest workers."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from tests.harness.distribution import pytest_generate_tests

PLUGIN = """
import pytest
@pytest.fixture(scope="session")
def plane(): pass
"""
TEST = """
import os, pytest
def test({fixture}, tmp_path_factory):
    print("ON", os.environ["PYTEST_XDIST_WORKER"], __file__[-4])
"""


def test_workers_follow_the_units(tmp_path):
    (tmp_path / "conftest.py").write_text(PLUGIN)
    for name, fixture in {"a": "tmp_path", "b": "plane", "c": "tmp_path", "d": "plane"}.items():
        (tmp_path / f"test_{name}.py").write_text(TEST.format(fixture=fixture))
    plugins = ["-p", "tests.harness.distribution", "-p", "no:cacheprovider"]
    argv = [sys.executable, "-m", "pytest", "-rP", "-n", "2", "--dist", "loadfile", *plugins, tmp_path]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    worker_of = {line.split()[2]: line.split()[1] for line in done.stdout.splitlines() if line[:3] == "ON "}
    assert worker_of["b"] == worker_of["d"]
    assert worker_of["a"] != worker_of["b"]
    assert "@" not in done.stdout, "ids are restored"


@pytest.mark.parametrize(
    ("values", "is_refused"), [({"a", "b"}, True), (frozenset("a"), True), (["b", "a"], False)]
)
def test_sets_of_parameters_are_refused(values, is_refused):
    marks = [pytest.mark.parametrize("name", values).mark]
    definition = SimpleNamespace(nodeid="test_x", iter_markers=lambda _: marks)
    if not is_refused:
        pytest_generate_tests(SimpleNamespace(definition=definition))
        return
    with pytest.raises(pytest.UsageError, match="test_x: sort the set of parameters 'name'"):
        pytest_generate_tests(SimpleNamespace(definition=definition))
