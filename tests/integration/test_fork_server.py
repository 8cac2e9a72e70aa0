"""Programs that start as copies of a process behave like programs that Popen starts."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testing.child_process import SOURCES, ChildProcess, ProcessDied, wait_until
from testing.engine.fork_server import ForkServer

PROGRAM = """
import atexit, contextlib, json, os, signal, sys, threading
from multiprocessing import resource_tracker

def say(what):
    os.write(int(sys.argv[1]), what.encode() + b"\\n")

def open_descriptors():
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was open for the list
            if os.readlink(f"/proc/self/fd/{name}") != os.devnull:
                yield int(name)

if sys.argv[2] == "describe":
    descriptors = sorted(set(open_descriptors()) - {resource_tracker._resource_tracker._fd})
    is_imported = "lmcache_sidecar.daemon" in sys.modules
    say(json.dumps([os.getcwd(), dict(os.environ), sys.argv, is_imported, __name__, descriptors]))
elif sys.argv[2] == "wait":
    say("waiting")
    signal.pause()
elif sys.argv[2] == "end":
    atexit.register(say, "atexit")
    threading.Thread(target=say, args=["thread"]).start()
    print("to the log")
elif sys.argv[2] == "die":
    from multiprocessing.shared_memory import SharedMemory
    memory = SharedMemory(create=True, size=1)
    say(json.dumps([memory.name, os.getsid(0), os.getpid()]))
    os.kill(os.getpid(), signal.SIGKILL)
elif sys.argv[2] == "exit":
    sys.exit(7)
else:
    raise ValueError(sys.argv[2])
"""


server = ForkServer("testing.imported", lambda: {"PYTHONPATH": SOURCES})


@pytest.fixture(autouse=True)
def _program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)


class Started:
    """A program that runs in a copy, with the output of its pipe."""

    def __init__(self, folder: Path, argument: str, **options: Any) -> None:
        self.log = folder / f"{argument}.log"
        read_end, write_end = os.pipe()
        variables = {**os.environ, "GREETING": "hello"}
        options |= {"cwd": str(folder), "env": variables, "pass_fds": [write_end]}
        self.process = server.start("program", [argument], self.log, **options)
        os.close(write_end)
        self.output = os.fdopen(read_end)


def test_program_gets_its_modules_environment_directory_and_arguments(tmp_path):
    started = Started(tmp_path, "describe")
    with started.output as output:
        folder, environment, argv, is_imported, name, descriptors = json.loads(output.readline())
    assert started.process.wait(60) == 0
    assert (folder, is_imported, name) == (str(tmp_path), True, "__main__")
    assert environment == {**os.environ, "GREETING": "hello"}
    assert argv[2:] == ["describe"]
    assert descriptors == [1, 2, int(argv[1])]


def test_concurrent_programs_end_independently(tmp_path):
    first, second = (Started(tmp_path, "wait") for _ in range(2))
    with first.output, second.output:
        assert first.output.readline() == second.output.readline() == "waiting\n"
        assert first.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            first.process.wait(0.01)
        first.process.kill()
        assert first.process.wait(60) == first.process.wait() == first.process.poll() == -signal.SIGKILL
        assert second.process.poll() is None
        second.process.send_signal(signal.SIGTERM)
        assert second.process.wait(60) == -signal.SIGTERM
        second.process.kill()  # the process has ended: the signal must not reach another process with its id


def test_threads_and_exit_handlers_finish_before_the_program_ends(tmp_path):
    started = Started(tmp_path, "end")
    with started.output as output:
        assert started.process.wait(60) == 0
        assert output.read() == "thread\natexit\n"
    assert started.log.read_text() == "to the log\n"


def test_shared_memory_of_a_killed_program_is_removed(tmp_path):
    started = Started(tmp_path, "die", start_new_session=True)
    with started.output as output:
        name, session, process_id = json.loads(output.readline())
    assert session == process_id
    assert started.process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not Path("/dev/shm", name).exists())
    wait_until(lambda: "leaked shared_memory" in started.log.read_text())


def test_failing_program_ends_its_child_process_and_logs_a_traceback(tmp_path):
    for argument, status in (("exit", 7), ("unknown", 1)):
        with ChildProcess("the program", tmp_path / f"{argument}.log") as child:
            started = Started(tmp_path, argument)
            started.output.close()
            child.adopt(started.process)
            assert started.process.wait(60) == status
            with pytest.raises(ProcessDied, match=f"the program exited with {status}"):
                child.check()
    assert "ValueError: unknown" in (tmp_path / "unknown.log").read_text()
