"""Runs a fuzz target in a child process, and saves the input of a crash."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from testing.child_process import REPOSITORY
from tests.fuzz import environment
from tests.fuzz.target import CRASHES, MAX_WAIT_SECONDS, SEEDS

PROGRESS_SECONDS = 15.0
MAX_RSS_MIB = 2048
"""Memory of the whole child process: a target must not leak either."""
_TAIL_LINES = 40


def fuzz(
    name: str, seconds: int, say: Callable[[str], None], crashes: Path = CRASHES, corpus: Path | None = None
) -> list[Path]:
    """Fuzz a target. Returns the paths of the crashes that it found and saved.

    The end of the child's output follows each crash: it has the traceback.
    """
    with tempfile.TemporaryDirectory(prefix="lmc-fuzz-artifacts-") as folder:
        command = [
            *(sys.executable, "-m", "tests.fuzz.child", name),
            *(f"-max_total_time={seconds}", f"-timeout={MAX_WAIT_SECONDS}", f"-rss_limit_mb={MAX_RSS_MIB}"),
            f"-artifact_prefix={folder}/",
            str(corpus or environment.corpus(name)),
            *([str(SEEDS / name)] if (SEEDS / name).is_dir() else []),
        ]
        tail = follow(command, lambda line: say(f"{name}: {line}"))
        artifacts = [path for path in Path(folder).iterdir() if path.is_file()]
        paths = [save(path, crashes / name) for path in artifacts]
    if tail or paths:
        say("\n".join(tail))
    if tail and not paths:
        raise RuntimeError(f"the fuzzer of {name} ended without a result")
    return paths


def follow(command: list[str], say: Callable[[str], None]) -> list[str]:
    """Run a command, and report some lines of its progress. Returns its last lines if it failed."""
    lines: list[str] = []
    reported = time.monotonic()
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment.variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines = [*lines[1 - _TAIL_LINES :], line.rstrip()]
                is_due = time.monotonic() > reported + PROGRESS_SECONDS
                if line.startswith("#") and (is_due or "DONE" in line):
                    say(" ".join(line.split()))
                    reported = time.monotonic()
        except BaseException:
            process.kill()
            raise
    return lines if process.returncode else []


def save(artifact: Path, folder: Path) -> Path:
    """Copy the input of a crash. Its name is a hash, so that a crash is saved once."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / hashlib.sha256(artifact.read_bytes()).hexdigest()[:16]
    shutil.copyfile(artifact, path)
    return path
