"""``lmcache-sidecar`` in this process. A process of its own would mostly import modules."""

from pathlib import Path
from unittest import mock

from lmcache_sidecar.command import main
from lmcache_sidecar.commands import asking
from testing.child_process import run_in_process
from testing.processes import SidecarProcess


def run_command(*arguments: str | Path, answer_seconds: float = 60.0) -> tuple[int, str]:
    """Run a command. Returns its exit status and what it printed.

    ``answer_seconds``: how long it waits for each answer.
    """
    with mock.patch.object(asking, "_TIMEOUT_SECONDS", answer_seconds):
        done = run_in_process(main, *arguments)
    return done.returncode, done.stdout + done.stderr


def explain(sidecar: SidecarProcess | str, *arguments: str, **options: float) -> tuple[int, str]:
    """Run ``lmcache-sidecar explain`` about a sidecar, or about the server at a URL."""
    url = sidecar if isinstance(sidecar, str) else sidecar.url
    return run_command("explain", "--url", url, *arguments, **options)
