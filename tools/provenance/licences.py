"""List the licences of all shipped Python packages, and refuse licences that are not on the list.

`render` makes ``docs/reference/licences.md``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.provenance.distributions import IMAGES, UNKNOWN, Distribution, image_locks, installed

ALLOWED = {
    "0BSD": "permissive",
    "Apache-2.0": "permissive; includes a patent licence",
    "BSD-2-Clause": "permissive",
    "BSD-3-Clause": "permissive",
    "ISC": "permissive",
    "MIT": "permissive",
    "MIT-0": "permissive; asks for no notice",
    "MPL-2.0": "changed files of the package must stay under MPL-2.0; this project changes none",
    "PSF-2.0": "permissive",
}
"""SPDX identifiers that a shipped package may have, and what they ask for."""
_PAGE = """\
# Licences

The images and the archives of `kubectl lmcache` contain these Python packages. `make generate` writes this
page from the lock files and from the metadata of the packages. `make audit` refuses a package whose licence
is not in the second table.

## Packages
| package | version | licence (SPDX) | in |
|---|---|---|---|
{packages}

LMCache Cluster has the licence Apache-2.0. The archives of `kubectl lmcache` have the packages of the
operator.

This page does not list:
- **Debian packages** of the images. Each has its licence in `/usr/share/doc/PACKAGE/copyright` of the image.
  The [SBOM](../how-to/verify-a-release.md#read-the-sbom) names the packages.
- **Libraries inside compiled packages**, such as OpenBLAS in numpy. The folder `PACKAGE.dist-info` in the
  image has their licences.
- **The engine and its packages.** Its image comes from vLLM or SGLang.

## Allowed licences
| licence | terms |
|---|---|
{allowed}
"""


class LicenceError(ValueError):
    """A text is no SPDX expression."""


def shipped() -> dict[Distribution, list[str]]:
    """Return all shipped packages with the images that contain them."""
    images: dict[Distribution, list[str]] = {}
    for image in IMAGES:
        for package in installed(image_locks(image)):
            images.setdefault(package, []).append(image)
    return dict(sorted(images.items()))


def problems(packages: dict[Distribution, list[str]]) -> Iterator[str]:
    """Return a line for each package whose licence is unknown or not allowed."""
    for package, images in packages.items():
        name = f"{package.name} {package.version} ({', '.join(images)})"
        if package.licence == UNKNOWN:
            yield f"{name}: the licence is unknown. Add it to TEXTS in tools/provenance/distributions.py."
            continue
        try:
            if not is_allowed(package.licence):
                yield f"{name}: {package.licence} is not in ALLOWED of tools/provenance/licences.py"
        except LicenceError as error:
            yield f"{name}: {error}"


def is_allowed(expression: str) -> bool:
    """Return whether an SPDX expression can be met with `ALLOWED` licences. Raises `LicenceError`."""
    tokens = re.findall(r"[()]|[^\s()]+", expression)
    try:
        result = _any(tokens)
    except IndexError as error:
        raise LicenceError(f"{expression!r} is no SPDX expression") from error
    if tokens:
        raise LicenceError(f"{expression!r} is no SPDX expression")
    return result


def _any(tokens: list[str]) -> bool:
    """Consume terms that OR separates."""
    result = _all(tokens)
    while tokens[:1] == ["OR"]:
        tokens.pop(0)
        result = _all(tokens) or result
    return result


def _all(tokens: list[str]) -> bool:
    """Consume terms that AND separates."""
    result = _term(tokens)
    while tokens[:1] == ["AND"]:
        tokens.pop(0)
        result = _term(tokens) and result
    return result


def _term(tokens: list[str]) -> bool:
    token = tokens.pop(0)
    if token == "(":
        result = _any(tokens)
        if tokens.pop(0) != ")":
            raise IndexError
        return result
    if tokens[:1] == ["WITH"]:
        token = f"{token} WITH {tokens[1]}"
        del tokens[:2]
    return token in ALLOWED


def render() -> str:
    """Return the page as Markdown."""
    rows = [
        f"| {package.name} | {package.version} | {package.licence} | {', '.join(images)} |"
        for package, images in shipped().items()
    ]
    allowed = [f"| {name} | {terms} |" for name, terms in ALLOWED.items()]
    return _PAGE.format(packages="\n".join(rows), allowed="\n".join(allowed))
