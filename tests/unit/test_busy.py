"""``make test-busy``: repeated runs next to busy loops, until one fails."""

import pytest

from tools import busy


@pytest.mark.parametrize(("statuses", "expected"), [([0, 0, 0], 0), ([0, 1], 1)])
def test_runs_until_one_fails_next_to_busy_loops(monkeypatch, capsys, statuses, expected):
    left = iter(statuses)
    loops = []

    class Loop:
        def __init__(self, command):
            loops.append("starts")

        def kill(self):
            loops.append("ends")

        def wait(self):
            pass

    class Ended:
        def __init__(self, command):
            assert command[1:] == ["-m", "pytest", "-q", "tests/test_one.py"]
            assert loops == ["starts", "starts"]
            self.returncode = next(left)

    monkeypatch.setattr(busy.subprocess, "Popen", Loop)
    monkeypatch.setattr(busy.subprocess, "run", Ended)
    monkeypatch.setattr("sys.argv", ["busy", "--runs", "3", "--loops", "2", "tests/test_one.py"])
    assert busy.main() == expected
    assert list(left) == []
    assert loops == ["starts", "starts", "ends", "ends"]
    assert f"run {len(statuses)} of 3" in capsys.readouterr().out
