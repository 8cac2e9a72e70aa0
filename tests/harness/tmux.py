"""A terminal for tests: tmux runs a shell in a window of a chosen size, and says what the window shows."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from testing.child_process import wait_until

_PROMPT = "ready>"


class Tmux:
    """One window with a shell. A context manager that ends the server and all its programs."""

    def __init__(self, columns: int, lines: int, environment: Mapping[str, str] | None = None) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="lmc-tmux-"))
        self._socket = str(self._folder / "socket")
        self._size = columns, lines
        self._environment = {**os.environ, "TERM": "screen-256color", **(environment or {})}
        self._environment.pop("TMUX", None)

    def __enter__(self) -> Self:
        columns, lines = map(str, self._size)
        rc_file = self._folder / "rc"
        rc_file.write_text(f"PS1='{_PROMPT} '\n")
        shell = f"exec bash --noprofile --rcfile {rc_file}"
        self._tmux("-f", os.devnull, "new-session", "-d", "-x", columns, "-y", lines, shell)
        self.wait_for(_PROMPT)
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["tmux", "-S", self._socket, "kill-server"], capture_output=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def screen(self) -> list[str]:
        """The lines that the window shows."""
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    @property
    def text(self) -> str:
        """The whole window as one text."""
        return "\n".join(self.screen)

    def run(self, command: str) -> None:
        """Type a command, and press Enter."""
        self.type(command)
        self.press("Enter")

    def type(self, text: str) -> None:
        """Type a text without Enter."""
        self._tmux("send-keys", "-l", "--", text)

    def press(self, *keys: str) -> None:
        """Press keys, by their names in tmux."""
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        """Change the size of the window."""
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def is_alternate(self) -> bool:
        """Whether a program uses the alternate screen, and has hidden the cursor."""
        return self._tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").strip() == "1 0"

    def is_restored(self) -> bool:
        """Whether the shell has its screen and cursor again, and shows its prompt."""
        state = self._tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").strip()
        shown = [line for line in self.screen if line]
        return state == "0 1" and bool(shown) and shown[-1].startswith(_PROMPT)

    def wait_for(self, text: str, *, timeout: float = 60.0) -> list[str]:
        """Wait until the window shows a text. Returns the lines of the window."""
        try:
            wait_until(lambda: text in self.text, timeout=timeout, what=f"the window shows {text!r}")
        except AssertionError as error:
            raise AssertionError(f"{error}:\n{self.text}") from error
        return self.screen

    def _tmux(self, *arguments: str) -> str:
        done: Any = subprocess.run(
            ["tmux", "-S", self._socket, *arguments], env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"tmux {arguments}: {done.stderr}"
        return str(done.stdout)
