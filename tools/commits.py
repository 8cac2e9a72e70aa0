"""Check the messages of the commits since the branch left the default branch: rule 12 of the standard.

The default branch is ``origin/main``, or ``main`` without a remote. No commit is checked if Git finds no
common commit, for example in a shallow clone.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tools.sources import PRODUCT, ROOT

DEFAULT_BRANCHES = ("origin/main", "main")
MAX_SUBJECT = 72
VERBS = frozenset((
    "add", "allow", "avoid", "change", "check", "correct", "create", "delete", "describe", "document", "drop",
    "explain", "fix", "give", "keep", "let", "make", "merge", "move", "print", "raise", "read", "refuse",
    "remove", "rename", "replace", "return", "rewrite", "say", "send", "shorten", "show", "split", "stop",
    "take", "update", "use", "wait", "write",
))  # fmt: skip
"""Verbs that begin a second change after "and". Verbs that are also common nouns are missing."""
IMPERATIVES = frozenset(
    ("bring", "embed", "exceed", "feed", "need", "ping", "proceed", "seed", "shed", "speed")
)
"""Imperatives that end like a participle."""
_PARTICIPLE = re.compile(r"\w{2,}(?:ed|ing)")
_LIMIT_FILE, _REASONS = "tools/check.py", "docs/comparison.md"
_LIMIT = re.compile(r"^MAX_PRODUCT_LINES = ([0-9_]+)", re.MULTILINE)
_TRAILER = re.compile(r"^[A-Z][\w-]*: .*$", re.MULTILINE)


class Commit(NamedTuple):
    """One commit as ``git log`` prints it."""

    id: str
    subject: str
    body: str
    paths: tuple[str, ...]


def problems(commit: Commit) -> Iterator[str]:
    """Yield a line for each rule that a commit's message breaks."""
    subject, name = commit.subject, f"{commit.id[:10]} {commit.subject!r}"
    first = subject.split(maxsplit=1)[0].lower() if subject.strip() else ""
    if len(subject) > MAX_SUBJECT:
        yield f"{name}: the subject has {len(subject)} characters, the limit is {MAX_SUBJECT}"
    if subject.endswith("."):
        yield f"{name}: the subject ends with a full stop"
    if _PARTICIPLE.fullmatch(first) and first not in IMPERATIVES:
        yield f"{name}: begin the subject with an imperative, not with {first!r}"
    second = next((verb for verb in re.findall(r" and (\w+)", subject) if verb in VERBS), None)
    if second:
        yield f"{name}: 'and {second}' joins two changes: make two commits"
    if not _TRAILER.sub("", commit.body).strip() and any(
        path.split("/")[0] in PRODUCT for path in commit.paths
    ):
        yield f"{name}: the commit changes product code, so its body must say why"


def limit_problem(commit: Commit, repository: Path = ROOT) -> str | None:
    """Return what is wrong with a commit that raises the limit of the product's size, or None.

    The limit rises for a row in the comparison with other projects, and for nothing else.
    """
    if _LIMIT_FILE not in commit.paths or _REASONS in commit.paths:
        return None
    texts = (
        _git(repository, "show", f"{revision}:{_LIMIT_FILE}") for revision in (f"{commit.id}~1", commit.id)
    )
    limits = [int(match[1]) for text in texts if (match := _LIMIT.search(text or ""))]
    if len(limits) < 2 or limits[1] <= limits[0]:
        return None
    return f"{commit.id[:10]} {commit.subject!r}: raises MAX_PRODUCT_LINES without a row of {_REASONS}"


def default_base(repository: Path = ROOT) -> str | None:
    """The commit at which HEAD left the default branch; None if Git does not find it."""
    if _git(repository, "rev-parse", "--is-shallow-repository") != "false":
        return None
    bases = (_git(repository, "merge-base", "HEAD", branch) for branch in DEFAULT_BRANCHES)
    return next(filter(None, bases), None)


def commits(base: str, repository: Path = ROOT) -> Iterator[Commit]:
    """Yield the commits after ``base`` up to HEAD, without merges."""
    listed = _git(
        repository, "log", "--no-merges", "--name-only", "--format=%x1e%H%x1f%s%x1f%b%x1f", f"{base}..HEAD"
    )
    for record in (listed or "").split("\x1e")[1:]:
        identity, subject, body, paths = record.split("\x1f")
        yield Commit(identity, subject, body, tuple(paths.split()))


def all_problems(repository: Path = ROOT) -> list[str]:
    """The problems of all commits since the default branch, one line each."""
    base = default_base(repository)
    lines: list[str] = []
    for commit in commits(base, repository) if base else ():
        lines += problems(commit)
        lines += filter(None, [limit_problem(commit, repository)])
    return lines


def _git(repository: Path, *arguments: str) -> str | None:
    """The output of a Git command; None if the command failed."""
    argv: Sequence[str | Path] = ["git", "-C", repository, *arguments]
    done = subprocess.run(argv, capture_output=True, text=True)
    return done.stdout.strip("\n") if done.returncode == 0 else None
