"""Leak guard of the test suite: modules that leave resources open fail, others pass."""

import gc
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from contextlib import ExitStack
from functools import partial
from multiprocessing import shared_memory
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.harness import leaks

pytest_plugins = ["pytester"]


def open_sockets(stack: ExitStack) -> None:
    for end in socket.socketpair():
        stack.enter_context(end)


def start_thread(stack: ExitStack) -> None:
    end = threading.Event()
    stack.callback(end.set)
    threading.Thread(target=end.wait, daemon=True).start()


def start_child(stack: ExitStack) -> None:
    child = subprocess.Popen(["sleep", "30"])
    stack.callback(child.wait)
    stack.callback(child.kill)


def make_folder(stack: ExitStack) -> None:
    stack.callback(shutil.rmtree, tempfile.mkdtemp(dir="/dev/shm", prefix="lmc-guard-"))


def map_segment(stack: ExitStack) -> None:
    segment = shared_memory.SharedMemory(create=True, size=16)
    segment.close()
    stack.callback(segment.unlink)


def open_file(stack: ExitStack) -> None:
    descriptor, path = tempfile.mkstemp(prefix="lmc-guard-")
    stack.callback(os.unlink, path)
    stack.callback(os.close, descriptor)


def open_epolls(stack: ExitStack) -> None:
    """Open descriptors of a kind that may stay open."""
    for _ in range(100):
        stack.enter_context(select.epoll())


OPENERS = {
    "2 descriptors: socket:*": open_sockets,
    "1 threads: Thread-*": start_thread,
    "1 children: sleep 30*": start_child,
    "1 shared_memory: /dev/shm/lmc-guard-*": make_folder,
    "1 shared_memory: */psm_*": map_segment,
    f"1 descriptors: {os.path.realpath(tempfile.gettempdir())}/lmc-guard-*": open_file,
}


def fixtures(opener, stack: ExitStack) -> ModuleType:
    """Return a plugin whose fixtures open and close the resources of a sample module."""
    plugin: Any = ModuleType("sample_fixtures")
    plugin.leak = pytest.fixture(scope="session", name="leak")(lambda: partial(opener, stack))
    plugin.close = pytest.fixture(scope="session", name="close")(lambda: stack.close)
    return plugin


@pytest.fixture
def run(pytester, monkeypatch):
    """Run a module with a leak guard in this process. Afterwards, close what it opened."""
    monkeypatch.setattr(leaks, "_lasting", leaks.Resources(*[Counter()] * 4))
    # The recorder of pytester keeps the frames of failed tests, and what these tests opened.
    monkeypatch.setattr(pytester, "make_hook_recorder", lambda _: SimpleNamespace())
    with ExitStack() as stack:

        def run_module(body, opener=open_sockets, *, max_descriptors=100_000, patience_seconds=0.2):
            pytester.makepyfile(test_sample=body)
            guard = leaks.LeakGuard(patience_seconds, max_descriptors)
            options = ("-p", "no:cacheprovider", "-p", "no:xdist", "--capture=sys", "--import-mode=importlib")
            return pytester.runpytest_inprocess(*options, plugins=[guard, fixtures(opener, stack)])

        yield run_module


@pytest.mark.parametrize("left", OPENERS)
def test_fails_leaking_modules_and_names_the_test(run, left):
    body = "def test_first(): pass\ndef test_middle(leak): leak()\ndef test_last(): pass\n"
    result = run(body, OPENERS[left])
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines([f"*test_sample.py leaves behind: {left}(opened during test_middle)*"])
    result.stdout.no_fnmatch_line("*opened during test_[!m]*")


def test_allows_files_of_packages_below_the_temporary_folder(run, pytester, monkeypatch):
    """Libraries such as matplotlib never close their fonts."""
    folder = f"{os.path.realpath(pytester.path)}/"
    monkeypatch.setattr(leaks, "_COUNTED", (folder,))
    monkeypatch.setattr(leaks, "_PACKAGES", (f"{folder}fonts",))

    def open_font(stack: ExitStack) -> None:
        stack.enter_context((pytester.path / "fonts.ttf").open("x"))

    run("def test_sample(leak): leak()", open_font).assert_outcomes(passed=1)


def test_allows_connections_to_a_listener_of_a_library(run):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dial = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}))"

        def accept(stack: ExitStack) -> None:
            subprocess.run([sys.executable, "-c", dial], check=True)
            stack.enter_context(listener.accept()[0])

        run("def test_sample(leak): leak()", accept).assert_outcomes(passed=1)


def test_frees_what_a_thread_leaves_that_ends_during_the_wait(run, monkeypatch):
    collect, has_sockets, has_collected = gc.collect, threading.Event(), threading.Event()

    def collect_and_note() -> int:
        number = collect()
        has_collected.set()
        return number

    def hold() -> None:
        cycle: list[object] = [*socket.socketpair()]
        cycle.append(cycle)
        has_sockets.set()
        has_collected.wait(60)

    def start(_: ExitStack) -> None:
        threading.Thread(target=hold).start()
        assert has_sockets.wait(60)

    monkeypatch.setattr(gc, "collect", collect_and_note)
    gc.disable()
    try:
        run("def test_sample(leak): leak()", start, patience_seconds=60).assert_outcomes(passed=1)
    finally:
        gc.enable()


def test_fails_the_module_after_which_the_process_has_too_many_descriptors_of_any_kind(run, pytester):
    pytester.makepyfile(test_then="def test_then(): pass")
    present = len(os.listdir("/proc/self/fd"))
    leak = "def test_sample(leak): leak()"
    run(leak, open_epolls, max_descriptors=present + 150).assert_outcomes(passed=2)
    result = run(leak, open_epolls, max_descriptors=present + 150)
    result.assert_outcomes(passed=2, errors=1)
    message = (
        f"the process has * descriptors after test_sample.py, the limit is {present + 150}: * anon_inode:*"
    )
    result.stdout.fnmatch_lines([message])


def test_names_the_test_whose_resource_is_left_instead_of_one_that_closed_an_equal_one(run):
    body = (
        "def test_first(leak): leak()\ndef test_closes(close): close()\n"
        "def test_leaks(leak): leak()\ndef test_last(): pass\n"
    )
    result = run(body, start_child)
    result.assert_outcomes(passed=4, errors=1)
    result.stdout.fnmatch_lines(["*1 children: sleep 30* (opened during test_leaks)*"])
