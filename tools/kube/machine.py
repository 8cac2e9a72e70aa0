"""A mix of the machine's own Kubernetes programs and of built ones, so that less is built.

    python -m tools.kube.machine NAME...

The demo takes its programs from here. Tests take theirs from `tools.kube.binaries`: the pinned versions.
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

from tools.cache import kept
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
"""How a program prints its version, and how many numbers of it must equal those of the pinned version.

Components of Kubernetes must share one minor version: a controller-manager newer than its API server is
not supported. A Helm of the same major version installs the same charts.
"""
_TIMEOUT_SECONDS = 20


def directory(names: Sequence[str]) -> Path:
    """A directory that holds ``names``; those that neither machine nor cache has are built first.

    If the cache holds all of them, the machine's own are not used. Raises `BinariesError`.
    """
    if found := binaries.find(names):
        return found
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
    return kept(f"kube/links-{digest[:16]}", link)


def missing(names: Sequence[str]) -> list[str]:
    """Those of ``names`` that `directory` would download or build."""
    if binaries.find(names):
        return []
    sources, _ = programs(names)
    return [name for name in names if name not in sources and binaries.find([name]) is None]


def programs(names: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Those of ``names`` that ``$KUBEBUILDER_ASSETS`` or PATH has in a fitting version.

    The second result says why others are refused.
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
            found = f"is version {_dotted(version)}" if version else "does not print its version"
            refusals.append(f"not taking {candidate}: it {found}; version {_dotted(wanted)} is needed")
    return sources, refusals


def _candidates(name: str) -> list[Path]:
    folders = (os.environ.get("KUBEBUILDER_ASSETS"), os.environ.get("PATH"))
    found = (shutil.which(name, path=folder) for folder in folders if folder)
    return [Path(path).absolute() for path in found if path]


def _version(program: Path, arguments: tuple[str, ...]) -> tuple[int, ...]:
    """Empty if the program does not print a version."""
    try:
        done = subprocess.run(
            [program, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return _numbers(done.stdout) if done.returncode == 0 else ()


def _numbers(text: str) -> tuple[int, ...]:
    """The first version in a text: (1, 36, 3) of ``Kubernetes v1.36.3``."""
    found = re.search(r"\bv?(\d+)\.(\d+)(?:\.(\d+))?", text)
    return tuple(int(part) for part in found.groups() if part) if found else ()


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
