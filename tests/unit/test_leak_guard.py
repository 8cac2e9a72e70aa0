"""The guard of the test suite: a module that leaves something open fails, and one that cleans up passes."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

OPENERS = {
    "descriptors": "import socket\nkept = []\ndef open_it():\n    kept.append(socket.socketpair())",
    "threads": (
        "import threading\nend = threading.Event()\n"
        "def open_it():\n    threading.Thread(target=end.wait, args=(30,), daemon=True).start()"
    ),
    "children": (
        "import subprocess\nkept = []\ndef open_it():\n    kept.append(subprocess.Popen(['sleep', '30']))"
    ),
    "shared_memory": (
        "import shutil, tempfile\nkept = []\n"
        "def open_it():\n    kept.append(tempfile.mkdtemp(dir='/dev/shm', prefix='lmc-guard-'))"
    ),
}
CLOSERS = {
    "descriptors": "[end.close() for pair in kept for end in pair]",
    "threads": "end.set()",
    "children": "[(child.kill(), child.wait()) for child in kept]",
    "shared_memory": "[shutil.rmtree(folder) for folder in kept]",
}
GUARD = """
from tests.harness import leaks

def pytest_configure(config):
    leaks.install(config, patience_seconds=0.2)
"""


@pytest.fixture
def run(pytester):
    def run_module(body: str):
        pytester.makeconftest(GUARD)
        pytester.makepyfile(test_it=body)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--import-mode=importlib")

    return run_module


@pytest.mark.parametrize("kind", OPENERS)
def test_fails_a_module_that_leaves_something_open(run, kind):
    clean_up = f"import atexit\natexit.register(lambda: ({CLOSERS[kind]}))"
    result = run(
        f"{OPENERS[kind]}\n{clean_up}\ndef test_first():\n    open_it()\ndef test_last():\n    pass\n"
    )
    result.assert_outcomes(passed=2, errors=1)
    num_left = 2 if kind == "descriptors" else 1
    result.stdout.fnmatch_lines([f"*test_it.py leaves behind: *{num_left} {kind}*"])


@pytest.mark.parametrize("kind", OPENERS)
def test_passes_a_module_whose_fixture_closes_everything(run, kind):
    fixture = (
        "import pytest\n@pytest.fixture(scope='module')\ndef opened():\n    open_it()\n    yield\n"
        f"    {CLOSERS[kind]}\n"
    )
    run(f"{OPENERS[kind]}\n{fixture}\ndef test_it(opened):\n    pass\n").assert_outcomes(passed=1)


def test_allows_what_a_fixture_of_the_session_opens(run):
    body = (
        f"{OPENERS['descriptors']}\nimport pytest\n"
        "@pytest.fixture(scope='session')\ndef opened():\n    open_it()\n    yield\n"
        "def test_it(opened):\n    pass\n"
    )
    run(body).assert_outcomes(passed=1)


def test_allows_a_child_of_the_session_that_was_started_anew(run):
    body = (
        "import subprocess\nimport pytest\n"
        "@pytest.fixture(scope='session')\ndef child():\n"
        "    children = [subprocess.Popen(['sleep', '30'])]\n    yield children\n"
        "    children[-1].kill()\n    children[-1].wait()\n"
        "def test_it(child):\n"
        "    child[0].kill()\n    child[0].wait()\n    child.append(subprocess.Popen(['sleep', '30']))\n"
    )
    run(body).assert_outcomes(passed=1)


def test_names_no_leak_in_a_module_that_has_failed(run):
    """A failed test keeps its frame, and with it whatever the test opened."""
    body = f"{OPENERS['descriptors']}\ndef test_it():\n    open_it()\n    raise AssertionError\n"
    run(body).assert_outcomes(failed=1)
