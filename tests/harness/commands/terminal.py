"""Runs the commands of documentation pages, as a reader who pastes them into one terminal.

The commands are the real ones: kubectl, Helm, redis-cli, curl and the project's own. `STAND_INS` replaces a
few that cannot run in a test, and still fails for a wrong argument.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import yaml

from testing.child_process import REPOSITORY, SOURCES
from tests.harness.fences import Fence, difference
from tools.resource_docs import CONDITIONS

STAND_INS = {
    # Images, packages and the environment take minutes. The target and its variables must exist.
    "make": 'command make --no-print-directory --dry-run "$@" >/dev/null',
    "pipx": '[[ "$1" = install ]] && command grep -q "^${2//[^a-z]/} = \\[" pyproject.toml',
    # The stand-ins need no time.
    "sleep": '[[ "$1" -gt 0 ]]',
    # No match is no error on a page.
    "grep": 'command grep "$@" || [[ $? = 1 ]]',
    "kubectl": f'{shlex.quote(sys.executable)} {Path(__file__).with_name("kubectl_stand_in.py")} "$@"',
}
_PATIENCE_SECONDS = 120.0
_END = "end of the commands"


class Terminal:
    """One bash, and a folder that looks like the checkout. A context manager that ends it.

    Variables and functions last from one fence to the next. The first command that fails ends the shell.
    """

    def __init__(self, folder: Path, path: Sequence[Path], environment: Mapping[str, str]) -> None:
        """``path`` are the first folders of PATH, ``environment`` more variables."""
        self.folder = folder / "checkout"
        self.folder.mkdir()
        for entry in REPOSITORY.iterdir():
            (self.folder / entry.name).symlink_to(entry)
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.words: dict[str, str] = {}
        """Words of a page, such as NAME, and what stands for them here."""
        programs = os.pathsep.join(map(str, [*path, Path(sys.executable).parent]))
        self._environment = {
            **os.environ,
            "HOME": str(folder),
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": SOURCES,
            **environment,
        }

    def __enter__(self) -> Self:
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self.folder,
            env=self._environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.define(STAND_INS)
        self._send("set -euo pipefail")
        return self

    def __exit__(self, *_: object) -> None:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        self._shell.kill()
        self._shell.wait()
        self._shell.stdin.close()
        self._shell.stdout.close()

    def define(self, functions: Mapping[str, str]) -> None:
        """Let functions stand for commands."""
        for name, body in functions.items():
            self._send(f"{name}() {{ {body}; }}")

    def run(self, fence: Fence) -> str:
        """Run one fence; returns its output.

        Raises AssertionError with the output if a command fails, or if the page shows another output.
        """
        script = self.temporary / "fence.sh"
        script.write_text(self.translated(fence.text))
        self._send(f". {script}; echo; echo '{_END}'")
        watchdog = threading.Timer(_PATIENCE_SECONDS, self._shell.kill)
        watchdog.start()
        output = "".join(self._lines())
        watchdog.cancel()
        watchdog.join()
        assert output.endswith(f"{_END}\n"), f"{fence} failed:\n{script.read_text()}\n{output}"
        assert "unknown field" not in output, f"{fence}:\n{output}"  # `kubectl patch` only warns
        printed = output.removesuffix(f"{_END}\n")
        if fence.output and not fence.output.reason:
            differs = difference(fence.output.text, printed, self.translated)
            assert not differs, f"{fence} prints another output than the page shows:\n{differs}"
        return printed

    def translated(self, text: str) -> str:
        """The text with `words` replaced, and files of /tmp in a folder of the test."""
        words = {"/tmp/": f"{self.temporary}/", **self.words}
        longest_first = sorted(words, key=len, reverse=True)
        bounds = {word: rf"\b{word}\b" if word.isidentifier() else re.escape(word) for word in words}
        pattern = "|".join(bounds[word] for word in longest_first)
        return re.sub(pattern, lambda match: words[match[0]], text)

    def _send(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(f"{line}\n")
        self._shell.stdin.flush()

    def _lines(self) -> Iterator[str]:
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            yield line
            if line.startswith(_END):
                return


def fields(crd: Path) -> list[str]:
    """Paths of all fields of a custom resource, such as ``status.hitPercent.disk``."""
    version = yaml.safe_load(crd.read_text())["spec"]["versions"][0]

    def below(schema: Mapping[str, Any], path: str) -> Iterator[str]:
        yield path
        for name, part in schema.get("properties", {}).items():
            yield from below(part, f"{path}.{name}" if path else name)
        if "items" in schema:
            yield from below(schema["items"], path)

    return sorted({*below(version["schema"]["openAPIV3Schema"], "")} - {""})


def facts(crd: Path, logs: str) -> str:
    """Return the knowledge of kubectl's stand-in, as JSON. ``kubectl logs`` prints ``logs``."""
    return json.dumps({"fields": fields(crd), "conditions": list(CONDITIONS), "logs": logs})
