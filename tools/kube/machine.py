"""Use the machine's own Kubernetes programs where they fit, and build only the others.

    python -m tools.kube.machine NAME...

The demo uses these programs. Tests use the pinned versions of `tools.kube.binaries`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.cache import cached_directory
from tools.kube import binaries

_KUBERNETES = (("--version",), 2, binaries.KUBERNETES)
RULES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "etcd": (("--version",), 2, binaries.ETCD),
    "kube-apiserver": _KUBERNETES,
    "kube-controller-manager": _KUBERNETES,
    "kube-scheduler": _KUBERNETES,
    "kubectl": (("version", "--client"), 2, binaries.KUBERNETES),
    "helm": (("version", "--short"), 1, binaries.HELM),
    "kwok": (("--version",), 2, binaries.KWOK),
}
"""Arguments that print a program's version, number of leading parts that must match, and pinned version.

Components of Kubernetes must share one minor version: a controller-manager newer than its API server is
not supported. A Helm of the same major version installs the same charts.
"""
_TIMEOUT_SECONDS = 20


def directory(names: Sequence[str]) -> Path:
    """Return a directory that has ``names``. Builds programs that machine and cache lack.

    If the cache has all programs, those of the machine are not used. Raises `BinariesError`.
    """
    if existing := binaries.find(names):
        return existing
    sources, refusals = programs(names)
    for line in [*refusals, *(f"taking {name} from {path.parent}" for name, path in sources.items())]:
        _say(line)
    if not sources:
        return binaries.directory(names)
    if rest := [name for name in names if name not in sources]:
        folder = binaries.directory(rest)
        sources |= {name: folder / name for name in rest}

    def link(target: Path) -> None:
        for name, source in sources.items():
            (target / name).symlink_to(source)

    digest = hashlib.sha256(repr(sorted(sources.items())).encode()).hexdigest()
    return cached_directory(f"kube/links-{digest[:16]}", link)


def missing(names: Sequence[str]) -> list[str]:
    """Return the programs that `directory` would download or build."""
    if binaries.find(names):
        return []
    sources, _ = programs(names)
    return [name for name in names if name not in sources and binaries.find([name]) is None]


def programs(names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return the programs that ``$KUBEBUILDER_ASSETS`` or PATH has in a fitting version.

    The second result has a sentence about each program in another version.
    """
    sources: dict[str, Path] = {}
    refusals = []
    for name in names:
        if name not in RULES:
            continue
        arguments, num_equal, pinned = RULES[name]
        wanted = _numbers(pinned)[:num_equal]
        for candidate in _candidates(name):
            version = _version(candidate, arguments)
            if version[:num_equal] == wanted:
                sources[name] = candidate
                break
            actual = f"is version {_dotted(version)}" if version else "does not print its version"
            refusals.append(f"not taking {candidate}: it {actual}; version {_dotted(wanted)} is needed")
    return sources, refusals


def _candidates(name: str) -> list[Path]:
    folders = (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
    paths = (shutil.which(name, path=folder) for folder in folders if folder)
    return [Path(path).absolute() for path in paths if path]


def _version(program: Path, arguments: tuple[str, ...]) -> tuple[int, ...]:
    """Return a program's version; empty if the program does not print it."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _numbers(done.stdout) if done.returncode == 0 else ()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the first version in a text: (1, 36, 3) for ``Kubernetes v1.36.3``."""
    match = re.search(r"\bv?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in match.groups() if part) if match else ()


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _say(text: str) -> None:
    print(f"[kube] {text}", file=sys.stderr, flush=True)


def main() -> int:
    try:
        print(directory(sys.argv[1:]))
    except binaries.BinariesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
