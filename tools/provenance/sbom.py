"""Write the SBOM of an image: CycloneDX 1.6 as JSON, from the files in the image.

    python -m tools.provenance.sbom operator IMAGE_FILES.tar --digest sha256:… > operator.cdx.json

The archive has the image's files as one tree, as ``crane export`` prints them. Python packages come from
their metadata in the image, with the hashes that the lock file accepts. Debian packages come from dpkg's
database, with the licences that their copyright file names. Equal images have equal SBOMs: there is no time
and no random number in them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

from tools.provenance.distributions import (
    IMAGES,
    ROOT,
    UNKNOWN,
    Distribution,
    Lock,
    image_locks,
    packages,
    parse,
)

_COPYRIGHT = re.compile(r"usr/share/doc/([^/]+)/copyright")
_DOC_FOLDER = re.compile(r"usr/share/doc/([^/]+)")
_LICENCE_FIELD = re.compile(r"^License:[ \t]*(\S.*?)[ \t]*$", re.MULTILINE)
_COMMON_LICENCE = re.compile(r"/usr/share/common-licenses/([A-Za-z]+[0-9]*(?:-[0-9]+(?:\.[0-9]+)*)?)")
REQUIREMENTS = ROOT / "tools" / "requirements" / "audit.txt"
PROJECT = "lmcache-cluster"
_VALIDATE = """
import sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(sys.stdin.read())
sys.exit(str(error) if error else 0)
"""

Component = dict[str, Any]


class SbomError(RuntimeError):
    """An image has no valid SBOM. The message names the defect."""


def sbom(image: str, digest: str, files: Path, locked: Mapping[str, Lock]) -> str:
    """Return the SBOM of an image as JSON.

    Args:
        image: name of the image, without registry.
        digest: its digest, ``sha256:…``.
        files: archive of its files.
        locked: the packages that its lock file accepts.

    Raises `SbomError` if the image has another version of a locked package, or one that is not locked.
    """
    python, debian, licences = contents(files)
    components = [_python_component(package, places, locked) for package, places in sorted(python.items())]
    components += [
        _debian_component(name, version, licences.get(name, ())) for name, version in sorted(debian.items())
    ]
    document = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{_identity(image, digest, components)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": image,
                "name": image,
                "version": digest,
                "hashes": [{"alg": "SHA-256", "content": digest.removeprefix("sha256:")}],
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
    }
    return json.dumps(document, indent=1) + "\n"


def _identity(*parts: object) -> uuid.UUID:
    """Return a UUID that depends on the content only."""
    return uuid.UUID(bytes=hashlib.sha256(repr(parts).encode()).digest()[:16], version=4)


def contents(files: Path) -> tuple[dict[Distribution, list[str]], dict[str, str], dict[str, list[str]]]:
    """Return the Python packages of an image with their folders, then versions and licences of Debian's."""
    python: dict[Distribution, list[str]] = {}
    debian: dict[str, str] = {}
    licences: dict[str, list[str]] = {}
    links: dict[str, str] = {}
    with tarfile.open(files) as archive:
        for member in archive:
            name = os.path.normpath(member.name).lstrip("/")
            if member.issym() and (folder := _DOC_FOLDER.fullmatch(name)):
                links[folder[1]] = member.linkname
            if not member.isfile():
                continue
            if name.endswith(".dist-info/METADATA"):
                package = parse(_text(archive, member))
                python.setdefault(package, []).append("/" + name.rsplit("/", 2)[0])
            elif name == "var/lib/dpkg/status":
                debian = dict(_installed_packages(_text(archive, member)))
            elif match := _COPYRIGHT.fullmatch(name):
                licences[match[1]] = debian_licences(_text(archive, member))
    # Packages of one source share a folder: /usr/share/doc/libgcc-s1 is a link to gcc-12-base.
    licences |= {name: licences[target] for name, target in links.items() if target in licences}
    return python, debian, licences


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    content = archive.extractfile(member)
    assert content is not None
    return content.read().decode(errors="replace")


def debian_licences(copyright_file: str) -> list[str]:
    """Return the licences that a Debian copyright file names, in Debian's words and sorted.

    A file in the format 1.0 has fields. In another file, the references to common licences count.
    Source: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
    """
    has_fields = copyright_file.lstrip().startswith("Format:")
    pattern = _LICENCE_FIELD if has_fields else _COMMON_LICENCE
    return sorted(set(pattern.findall(copyright_file)))


def _installed_packages(status: str) -> Iterator[tuple[str, str]]:
    for paragraph in filter(str.strip, status.split("\n\n")):
        fields = HeaderParser().parsestr(paragraph.lstrip("\n"))
        if fields["Status"] == "install ok installed":
            yield fields["Package"], fields["Version"]


def _python_component(package: Distribution, places: list[str], locked: Mapping[str, Lock]) -> Component:
    lock = locked.get(package.name)
    if package.name != PROJECT and (lock is None or lock.version != package.version):
        expected = f"the lock file has {lock.version}" if lock else "the lock file does not have it"
        raise SbomError(f"the image has {package.name} {package.version} in {places[0]}, and {expected}")
    purl = f"pkg:pypi/{package.name}@{package.version}"
    component: Component = {
        "type": "library",
        "bom-ref": purl,
        "name": package.name,
        "version": package.version,
        "purl": purl,
        "properties": [{"name": "lmcache:folder", "value": place} for place in sorted(set(places))],
    }
    if package.licence != UNKNOWN:
        component["licenses"] = [{"expression": package.licence}]
    if lock:
        component["externalReferences"] = [
            {
                "type": "distribution",
                "url": f"https://pypi.org/project/{package.name}/{package.version}/#files",
                "comment": "the image contains one of the files with these hashes",
                "hashes": [{"alg": "SHA-256", "content": digest} for digest in lock.sha256],
            }
        ]
    return component


def _debian_component(name: str, version: str, licences: Sequence[str]) -> Component:
    purl = f"pkg:deb/debian/{name}@{version.replace(':', '%3A').replace('+', '%2B')}"
    component: Component = {"type": "library", "bom-ref": purl}
    component |= {"name": name, "version": version, "purl": purl}
    if licences:
        component["licenses"] = [{"license": {"name": licence}} for licence in licences]
    return component


def validate(document: str) -> None:
    """Check an SBOM against the schema of CycloneDX. Raises `SbomError`."""
    folder = packages(REQUIREMENTS.read_text(), "audit")
    env = {**os.environ, "PYTHONPATH": str(folder)}
    argv = [sys.executable, "-c", _VALIDATE]
    done = subprocess.run(argv, input=document, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SbomError(f"the SBOM is no valid CycloneDX document:\n{done.stderr.strip()}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("image", choices=IMAGES)
    parser.add_argument("files", type=Path, metavar="IMAGE_FILES.tar")
    parser.add_argument("--digest", required=True, help="digest of the image, sha256:…")
    options = parser.parse_args()
    try:
        document = sbom(options.image, options.digest, options.files, image_locks(options.image))
        validate(document)
    except SbomError as error:
        print(error, file=sys.stderr)
        return 1
    print(document, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
