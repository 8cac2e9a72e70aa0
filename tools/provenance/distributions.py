"""Python distributions: what their metadata says, and what the lock files allow."""

from __future__ import annotations

import hashlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

from tools.cache import cached_directory, uv

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("operator", "router", "sidecar")
"""Images of a release. Each has a lock file ``IMAGE/requirements.txt``."""
TEXTS = {
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "Apache License, Version 2.0": "Apache-2.0",
    "MIT License": "MIT",
}
"""SPDX identifiers of free texts in the old field ``License``."""
CLASSIFIERS = {
    "Apache Software License": "Apache-2.0",
    "BSD License": "BSD-3-Clause",
    "ISC License (ISCL)": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
"""SPDX identifiers of classifiers, for packages whose field ``License`` has the licence's whole text."""
UNKNOWN = "unknown"
_MAX_EXPRESSION_CHARACTERS = 60


@dataclass(frozen=True)
class Lock:
    """One package in a lock file."""

    name: str
    version: str
    sha256: tuple[str, ...]
    """Hashes of all files of this version. An installer accepts no others."""


@dataclass(frozen=True, order=True)
class Distribution:
    """An installed package, as its metadata says."""

    name: str
    """In the normalized form of the package index."""
    version: str
    licence: str
    """SPDX expression, or `UNKNOWN`."""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def locks(path: Path) -> dict[str, Lock]:
    """Return the packages of a lock file by name."""
    pins = {}
    for entry in re.split(r"\n(?=\S)", path.read_text().strip()):
        if pin := re.match(r"([\w.-]+)==([^\s\\]+)", entry):
            hashes = tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
            pins[normalized(pin[1])] = Lock(normalized(pin[1]), pin[2], hashes)
    return pins


def image_locks(image: str) -> dict[str, Lock]:
    return locks(ROOT / image / "requirements.txt")


def parse(metadata: str) -> Distribution:
    """Return the distribution that a file ``METADATA`` describes. Raises ValueError if it names none."""
    message: Message = HeaderParser().parsestr(metadata)
    name, version = message["Name"], message["Version"]
    if not name or not version:
        raise ValueError("the metadata has no name or no version")
    return Distribution(normalized(str(name)), str(version), _licence(message))


def _licence(metadata: Message) -> str:
    """Return the licence: the SPDX expression, else the free text, else the classifier."""
    if expression := metadata["License-Expression"]:
        return str(expression)
    text = str(metadata["License"] or "").strip()
    if text and "\n" not in text and len(text) <= _MAX_EXPRESSION_CHARACTERS:
        return TEXTS.get(text, text)
    classifiers = [str(line).rpartition(" :: ")[2] for line in metadata.get_all("Classifier", [])]
    known = [CLASSIFIERS[name] for name in classifiers if name in CLASSIFIERS]
    return known[0] if len(known) == 1 else UNKNOWN


def installed(wanted: Mapping[str, Lock]) -> list[Distribution]:
    """Return the distributions of a lock file: from this environment, else from a folder of the cache.

    The folder is made by uv, which needs the package index. Raises CalledProcessError if it fails.
    """
    distributions = {name: here for name, lock in wanted.items() if (here := _here(lock))}
    if missing := [lock for name, lock in wanted.items() if name not in distributions]:
        distributions |= {package.name: package for package in _fetched(missing)}
    return sorted(distributions.values())


def _here(lock: Lock) -> Distribution | None:
    try:
        text = importlib.metadata.distribution(lock.name).read_text("METADATA")
    except importlib.metadata.PackageNotFoundError:
        return None
    distribution = parse(text) if text else None  # Debian's packages have no such file
    return distribution if distribution and distribution.version == lock.version else None


def _fetched(wanted: Sequence[Lock]) -> list[Distribution]:
    requirements = "".join(
        f"{lock.name}=={lock.version} {' '.join(f'--hash=sha256:{digest}' for digest in lock.sha256)}\n"
        for lock in wanted
    )
    folder = packages(requirements, "licences")
    return [parse(path.read_text()) for path in folder.glob("*.dist-info/METADATA")]


def packages(requirements: str, purpose: str) -> Path:
    """Return a folder of the cache directory with these locked packages, to put into ``PYTHONPATH``.

    Raises CalledProcessError if uv cannot install them.
    """
    tag = f"{sys.implementation.cache_tag}\n{requirements}"
    digest = hashlib.sha256(tag.encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        options = ["--quiet", "--no-deps", "--require-hashes", "--python", sys.executable]
        options += ["--target", str(folder), "--requirements", "-"]
        subprocess.run([uv(), "pip", "install", *options], input=requirements, text=True, check=True)

    return cached_directory(f"{purpose}-{digest}", make)
