"""Git repositories of tests."""

import subprocess
from pathlib import Path


def git(repository: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(repository), *arguments], check=True, capture_output=True)


def new_repository(folder: Path) -> Path:
    """Make an empty repository whose branch is ``main``."""
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "config", "user.name", "A")
    git(folder, "config", "user.email", "a@example.com")
    return folder


def commit(repository: Path, path: str, *message: str) -> None:
    """Add a line to a file, and commit all changes. Each part of the message is a paragraph."""
    (repository / path).parent.mkdir(exist_ok=True)
    with (repository / path).open("a") as file:
        file.write("text\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", *(part for text in message or (path,) for part in ("-m", text)))
