"""``.ci/run`` with a stand-in for make: which targets run, what the output ends with, and the exit status."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SUMMARY = "9 passed, 1 skipped in 1063.21s (0:17:43)"
MAKE = f"""#!/bin/sh
echo "make $*"
case "$1" in test*) echo "{SUMMARY}"; echo;; esac
[ "$1" != "$FAILS" ]
"""
# Without a node. The branch changes the documentation if DOCS is 0.
PYTHON = """#!/bin/sh
case "$*" in *testing.node) exit 1;; *--docs) exit "$DOCS";; esac
"""


@pytest.fixture
def run(tmp_path):
    """Run the script; returns its exit status and its lines."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    for name, text in (("bin/make", MAKE), (".venv/bin/python", PYTHON)):
        program = tmp_path / name
        program.parent.mkdir(parents=True)
        program.write_text(text)
        program.chmod(0o755)

    def run(fails: str = "", docs: int = 0) -> tuple[int, list[str]]:
        path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
        env = {"PATH": path, "FAILS": fails, "DOCS": str(docs), "TMPDIR": str(tmp_path)}
        done = subprocess.run(
            tmp_path / ".ci" / "run", env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        return done.returncode, done.stdout.splitlines()

    return run


def parts(lines: list[str]) -> list[str]:
    return [
        re.sub(r" +\d+:\d\d", "", line.removeprefix("[ci] ")) for line in lines if line.startswith("[ci]")
    ]


def test_prints_the_time_of_each_part_before_the_summary(run):
    status, lines = run()
    assert status == 0
    assert sorted(parts(lines)) == ["all", "check", "docs", "kube", "setup", "test"]
    assert lines[-2].startswith("[ci] all")
    assert lines[-1] == SUMMARY
    assert "make test WITHOUT_DOCS=1" in lines


def test_omits_the_tests_of_the_documentation_if_the_branch_cannot_break_them(run):
    status, lines = run(docs=1)
    assert status == 0
    assert "make test-docs" not in lines
    assert "make test WITHOUT_DOCS=" in lines


@pytest.mark.parametrize(
    ("target", "part"),
    [("setup", "setup"), ("kube", "kube"), ("check", "check"), ("test-docs", "docs"), ("test", "test")],
)
def test_fails_and_stops_if_a_part_fails(run, target, part):
    status, lines = run(fails=target)
    assert status == 1
    assert f"{part}  failed" in parts(lines)
    assert any(line.startswith("make test ") for line in lines) is (part == "test")
