"""Leak guard of the test suite: modules that leave resources open fail, others pass."""

from __future__ import annotations

import tempfile

import pytest

pytest_plugins = ["pytester"]

OPENERS = {
    "descriptors": "import socket\nresources = []\ndef leak():\n    resources.append(socket.socketpair())",
    "threads": (
        "import threading\nend = threading.Event()\n"
        "def leak():\n    threading.Thread(target=end.wait, args=(30,), daemon=True).start()"
    ),
    "children": (
        "import subprocess\nresources = []\n"
        "def leak():\n    resources.append(subprocess.Popen(['sleep', '30']))"
    ),
    "shared_memory": (
        "import shutil, tempfile\nresources = []\n"
        "def leak():\n    resources.append(tempfile.mkdtemp(dir='/dev/shm', prefix='lmc-guard-'))"
    ),
}
OTHER_OPENERS = {
    "1 descriptors: */memfd:lmc": "import os\ndef leak():\n    os.memfd_create('lmc')",
    "1 shared_memory: */psm_": (
        "import atexit\nfrom multiprocessing import shared_memory\n"
        "def leak():\n    segment = shared_memory.SharedMemory(create=True, size=16)\n"
        "    atexit.register(segment.unlink)\n    segment.close()"
    ),
    "1 shared_memory: */lmc-guard-file": (
        "import atexit, os, pathlib\nfile = pathlib.Path(f'/dev/shm/lmc-guard-file-{os.getpid()}')\n"
        "def leak():\n    file.write_text('')\n    atexit.register(file.unlink)"
    ),
}
CLOSERS = {
    "descriptors": "[end.close() for pair in resources for end in pair]",
    "threads": "end.set()",
    "children": "[(child.kill(), child.wait()) for child in resources]",
    "shared_memory": "[shutil.rmtree(folder) for folder in resources]",
}
GUARD = """
from tests.harness import leaks

def pytest_configure(config):
    leaks.install(config, patience_seconds=0.2, max_descriptors=MAX)
"""


@pytest.fixture
def run(pytester):
    def run_module(body: str, max_descriptors: int = 900):
        pytester.makeconftest(GUARD.replace("MAX", str(max_descriptors)))
        pytester.makepyfile(test_sample=body)
        return pytester.runpytest_subprocess("-p", "no:cacheprovider", "--import-mode=importlib")

    return run_module


def leaking(kind: str) -> str:
    """Return the first lines of a module that may leak, and that cleans up when the process ends."""
    return f"{OPENERS[kind]}\nimport atexit\natexit.register(lambda: ({CLOSERS[kind]}))\n"


@pytest.mark.parametrize("kind", OPENERS)
def test_fails_leaking_modules(run, kind):
    result = run(
        f"{leaking(kind)}"
        "def test_first():\n    pass\ndef test_middle():\n    leak()\ndef test_last():\n    pass\n"
    )
    result.assert_outcomes(passed=3, errors=1)
    num_left = 2 if kind == "descriptors" else 1
    result.stdout.fnmatch_lines(
        [f"*test_sample.py leaves behind: *{num_left} {kind}: *(opened during test_middle)*"]
    )
    result.stdout.no_fnmatch_line("*opened during test_[!m]*")


@pytest.mark.parametrize("left", OTHER_OPENERS)
def test_fails_modules_that_leave_other_files(run, left):
    result = run(f"{OTHER_OPENERS[left]}\ndef test_sample():\n    leak()\n")
    result.assert_outcomes(passed=1, errors=1)
    result.stdout.fnmatch_lines([f"*test_sample.py leaves behind: {left}*(opened during test_sample)*"])


EPOLLS = "import select\nopened = []\ndef leak():\n    opened.extend(select.epoll() for _ in range(100))\n"
"""Opens descriptors of a kind that may stay open."""


def test_fails_the_module_after_which_the_process_has_too_many_descriptors_of_any_kind(run, pytester):
    pytester.makepyfile(test_then="def test_then():\n    pass\n")
    result = run(f"{EPOLLS}def test_sample():\n    leak()\n", max_descriptors=100)
    result.assert_outcomes(passed=2, errors=1)
    result.stdout.fnmatch_lines(
        ["the process has 1?? descriptors after test_sample.py, the limit is 100: 100 anon_inode:*"]
    )
    run(f"{EPOLLS}def test_sample():\n    leak()\n", max_descriptors=200).assert_outcomes(passed=2)


def test_names_each_leaking_test_and_its_parameter(run):
    result = run(
        f"{leaking('threads')}import pytest\n"
        "@pytest.mark.parametrize('count', [0, 1])\n"
        "def test_first(count):\n    [leak() for _ in range(count)]\ndef test_last():\n    leak()\n"
    )
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*2 threads: *(opened during test_first?1?), *(opened during test_last)*"])


def test_names_the_test_whose_resource_is_left_instead_of_one_that_closed_an_equal_one(run):
    result = run(
        f"{leaking('children')}def test_first():\n    leak()\n"
        "def test_closes():\n    child = resources.pop()\n    child.kill()\n    child.wait()\n"
        "def test_leaks():\n    leak()\ndef test_last():\n    pass\n"
    )
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*1 children: sleep 30* (opened during test_leaks)*"])


@pytest.mark.parametrize("kind", OPENERS)
def test_passes_modules_whose_fixtures_close_everything(run, kind):
    fixture = (
        "import pytest\n@pytest.fixture(scope='module')\ndef opened():\n    leak()\n    yield\n"
        f"    {CLOSERS[kind]}\n"
    )
    run(f"{OPENERS[kind]}\n{fixture}\ndef test_sample(opened):\n    pass\n").assert_outcomes(passed=1)


def test_allows_resources_of_session_fixtures(run):
    body = (
        f"{OPENERS['descriptors']}\nimport pytest\n"
        "@pytest.fixture(scope='session')\ndef opened():\n    leak()\n    yield\n"
        "def test_sample(opened):\n    pass\n"
    )
    run(body).assert_outcomes(passed=1)


def test_allows_restarted_child_of_a_session_fixture(run):
    body = (
        "import subprocess\nimport pytest\n"
        "@pytest.fixture(scope='session')\ndef child():\n"
        "    children = [subprocess.Popen(['sleep', '30'])]\n    yield children\n"
        "    children[-1].kill()\n    children[-1].wait()\n"
        "def test_sample(child):\n"
        "    child[0].kill()\n    child[0].wait()\n    child.append(subprocess.Popen(['sleep', '30']))\n"
    )
    run(body).assert_outcomes(passed=1)


def test_reports_no_leak_in_failed_modules(run):
    """A failed test keeps its frame, and its frame keeps everything the test opened."""
    body = f"{OPENERS['descriptors']}\ndef test_sample():\n    leak()\n    raise AssertionError\n"
    run(body).assert_outcomes(failed=1)


FLAKY = (
    f"{OPENERS['descriptors']}\nimport pytest, socket\nattempts = []\n"
    "@pytest.mark.flaky(reruns=1)\ndef test_flaky():\n    attempts.append(1)\n"
    "    opened = socket.socket()\n    assert len(attempts) > 1\n    opened.close()\n"
)
"""A module with a test that fails once, while a socket is open."""


def test_reports_leaks_of_modules_whose_failed_tests_passed_in_a_second_attempt(run):
    result = run(f"{FLAKY}def test_leaks():\n    leak()\n")
    assert result.parseoutcomes() == {"passed": 2, "errors": 1, "rerun": 1}
    result.stdout.fnmatch_lines(
        ["*test_sample.py leaves behind: 2 descriptors: *(opened during test_leaks)*"]
    )


def test_reports_leaks_of_the_last_test_in_its_second_attempt(run):
    result = run(FLAKY.replace("    opened.close()\n", "    opened.close()\n    leak()\n"))
    assert result.parseoutcomes() == {"passed": 1, "errors": 1, "rerun": 1}


def test_allows_what_only_the_failed_first_attempt_had_open(run):
    for body in (FLAKY, f"{FLAKY}def test_last():\n    pass\n"):
        assert run(body).parseoutcomes().keys() == {"passed", "rerun"}


def test_files_in_the_folder_of_another_process_are_not_leaks(run):
    with tempfile.TemporaryDirectory(prefix="lmc-guard-", dir="/dev/shm") as folder:
        result = run(f"from pathlib import Path\ndef test_one():\n    Path({folder!r}, 'x').write_text('')")
    result.assert_outcomes(passed=1)
