"""``vllm serve`` for tests: no process is left after any failure."""

import contextlib
import sys
from pathlib import Path

import pytest

from testing.child_process import free_port, wait_until
from testing.engine.process import EngineFailed, ServedEngine

SERVER_WITH_CHILD = """#!/bin/sh
sleep 3600 &
echo $! >"$CHILD"
trap 'exit 0' INT
wait
"""
"""A server that ends at SIGINT, and leaves a child process."""


def is_alive(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.mark.parametrize("is_killed", [False, True])
def test_engine_that_never_became_ready_leaves_no_process(is_killed, tmp_path, monkeypatch):
    program, child = tmp_path / "vllm", tmp_path / "child"
    program.write_text(SERVER_WITH_CHILD)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", f"{tmp_path}/python")
    with ServedEngine(tmp_path / "log", free_port(), environment={"CHILD": f"{child}"}) as engine:
        wait_until(lambda: child.exists() and child.read_text().strip(), timeout=60)
        with pytest.raises(EngineFailed, match="not up"):
            engine.wait_ready(timeout=0)
        if is_killed:
            engine.kill()
    wait_until(lambda: not is_alive(int(child.read_text())), timeout=60)
