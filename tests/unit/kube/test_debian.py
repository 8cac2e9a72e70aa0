"""Installation of Debian packages on a machine whose package manager is busy."""

import os
from pathlib import Path

import pytest

from tools import debian
from tools.sources import ROOT

LOCKED = "E: Could not get lock /var/lib/apt/lists/lock. It is held by process 7 (apt-get)"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which an apt-get writes its arguments. It fails with the lines of ``errors``, one a call."""
    program, record = tmp_path / "apt-get", tmp_path / "calls"
    program.write_text(
        f"""#!/bin/sh
echo "$@" >> {record}
error=$(sed -n "$(wc -l < {record})p" {tmp_path}/errors 2> /dev/null)
[ -z "$error" ] || {{ echo "$error" >&2; exit 100; }}
"""
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    monkeypatch.setattr(debian, "_PAUSE_SECONDS", 0)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    return record


def test_lock_of_the_lists_is_waited_for(calls, tmp_path) -> None:
    """The option of apt waits only for the lock of dpkg."""
    (tmp_path / "errors").write_text(f"{LOCKED}\n{LOCKED}\n\n{LOCKED}\n")
    debian.install_packages(["gcc", "make"])
    update, wait = "-o DPkg::Lock::Timeout=300 update -qq", "-o DPkg::Lock::Timeout=300 install -y -qq"
    made = calls.read_text().splitlines()
    assert made[:3] == [update] * 3
    assert made[3:] == [f"{wait} --no-install-recommends gcc make"] * 2


def test_other_failures_and_a_lock_that_stays_are_errors(calls, tmp_path, monkeypatch) -> None:
    (tmp_path / "errors").write_text("E: Unable to locate package\n")
    with pytest.raises(
        debian.PackagesError, match="apt-get update failed; run: sudo apt-get install gcc\nE: Una"
    ):
        debian.install_packages(["gcc"])
    assert len(calls.read_text().splitlines()) == 1
    monkeypatch.setattr(debian, "_LOCK_SECONDS", 0)
    (tmp_path / "errors").write_text(f"\n{LOCKED}\n")
    with pytest.raises(debian.PackagesError, match="Could not get lock"):
        debian.install_packages(["gcc"])


def test_set_up_installs_by_the_same_code(calls, tmp_path) -> None:
    assert '"$python" -m tools.debian $missing' in (ROOT / "tools" / "setup.sh").read_text()
    assert debian.main(["gcc"]) == 0
    (tmp_path / "errors").write_text("\n\nE: no space left\n")
    assert debian.main(["gcc"]) == 1
