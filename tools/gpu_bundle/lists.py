"""Lists of Python packages: the packages that a bundle needs, and those that the GPU machine has.

A list of needed packages has the form of ``tools/requirements``: exact versions with hashes. A list of
installed packages has one name on each line, as ``pip freeze`` or ``pip list --format=freeze`` prints it.
"""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parent / "requirements"
PROJECT, TRANSFORMERS, VLLM, MACHINE = (
    FOLDER / f"{name}.txt" for name in ("project", "transformers", "vllm", "machine")
)


class Requirement(NamedTuple):
    """One package of a list."""

    name: str
    version: str
    text: str
    """The entry with its hashes."""


def normalized(name: str) -> str:
    """Return the name of a distribution in the form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(path: Path) -> list[Requirement]:
    """Return the packages of a list of exact versions. Raises ValueError for an entry of another form."""
    packages = []
    for entry in re.split(r"\n(?=\S)", _without_comments(path).strip()):
        match = re.match(r"([\w.-]+)==([^\s;\\]+)", entry)
        if match is None:
            raise ValueError(f"{path}: {entry.splitlines()[0]!r} is not NAME==VERSION")
        packages.append(Requirement(normalized(match[1]), match[2], entry.strip()))
    return packages


def installed(path: Path) -> frozenset[str]:
    """Return the names in a list of installed packages. Lines that name no package are ignored."""
    names = re.findall(r"^([A-Za-z0-9][\w.-]*)", _without_comments(path), re.MULTILINE)
    return frozenset(map(normalized, names))


class Choice(NamedTuple):
    """The packages in a bundle, and those that it expects on the machine."""

    packed: list[Requirement]
    """Packages that the machine lacks, in alphabetical order."""
    expected: list[str]
    """Names of needed packages that the machine has."""


def choose(present: Set[str], *, with_vllm: bool) -> Choice:
    """Divide the needed packages between the bundle and the machine.

    A machine that has transformers has the packages that its version of transformers needs.
    """
    paths = [PROJECT]
    if "transformers" not in present:
        paths.append(TRANSFORMERS)
    if with_vllm:
        paths.append(VLLM)  # last: its versions replace those of the other lists
    needed = {package.name: package for path in paths for package in requirements(path)}
    needed.pop("vllm", None)
    from_machine = {"torch", "transformers", *needed} & {"torch", *present}
    packed = [package for package in needed.values() if package.name not in present]
    return Choice(sorted(packed), sorted(from_machine))


def vllm() -> Requirement:
    """Return the engine itself."""
    (package,) = (package for package in requirements(VLLM) if package.name == "vllm")
    return package


def _without_comments(path: Path) -> str:
    return re.sub(r"(?m)^\s*#.*\n|\s+#.*$", "", path.read_text())
