"""Core pinning and processor time of a process with a thread and a child."""

import os
import subprocess
import sys

import pytest

from benchmarks import cores

PROGRAM = """
import os, subprocess, sys, threading, time
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
threading.Thread(target=threading.Event().wait, daemon=True).start()
while time.process_time() < 0.3:
    pass
print(child.pid, flush=True)
if sys.stdin.readline():  # a thread that chooses its own cores
    def choose(): os.sched_setaffinity(0, CORES); print("chosen", flush=True); threading.Event().wait()
    threading.Thread(target=choose, daemon=True).start()
sys.stdin.read()
child.communicate()
"""


@pytest.fixture
def family():
    program = PROGRAM.replace("CORES", str(os.sched_getaffinity(0)))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        yield parent, int(parent.stdout.readline())


def test_process_tree_contains_children_and_their_time(family):
    parent, child = family
    assert cores.process_tree(parent.pid) == [parent.pid, child]
    used_seconds = cores.cpu_seconds([parent.pid])
    assert used_seconds >= 0.2, "the program computes for 0.3 s, and the kernel counts in ticks"
    assert used_seconds > cores.cpu_seconds([child])


def test_pin_applies_to_all_threads(family):
    parent, child = family
    core = min(os.sched_getaffinity(0))
    cores.pin([parent.pid], {core})
    for pid in parent.pid, child:
        assert {frozenset(os.sched_getaffinity(task)) for task in cores._tasks(pid)} == {frozenset([core])}
    cores.check_pinned([parent.pid], {core})


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: every thread is on it")
def test_thread_that_leaves_its_cores_is_detected(family):
    parent, _ = family
    core = min(os.sched_getaffinity(0))
    cores.pin([parent.pid], {core})
    parent.stdin.write("\n")
    parent.stdin.flush()
    assert parent.stdout.readline() == "chosen\n"
    with pytest.raises(cores.NotPinnedError, match="may run on cores"):
        cores.check_pinned([parent.pid], {core})
