"""SBOMs from the files of an image, and provenance statements."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from tools.provenance import statement
from tools.provenance.distributions import ROOT, Lock, image_locks
from tools.provenance.sbom import SbomError, sbom

DIGEST = "sha256:" + "a" * 64
SITE = "opt/lmcache/venv/lib/python3.11/site-packages"
STATUS = """\
Package: libc6
Status: install ok installed
Version: 2.36-9+deb12u10

Package: perl-base
Status: deinstall ok config-files
Version: 5.36.0-7

Package: zlib1g
Status: install ok installed
Description: a library
 over two lines
Version: 1:1.2.13.dfsg-1
"""
FREE_TEXT = """Most of it: see `/usr/share/common-licenses/LGPL-2.1'.
Words: see /usr/share/common-licenses/CC0-1.0.
Tools: see /usr/share/common-licenses/GPL-2. Again: /usr/share/common-licenses/GPL-2
License: this line is no field
"""
FIELDS = """Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
License: Zlib

Files: debian/*
License: GPL-2+ with OpenSSL exception

License: Zlib
 On Debian systems, see /usr/share/common-licenses/GPL-3
"""
LOCKED = {"numpy": Lock("numpy", "2.3.5", ("1" * 64, "2" * 64))}


def metadata(name: str, version: str, licence: str = "BSD-3-Clause") -> str:
    return f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\nLicense-Expression: {licence}\n"


PROJECT = metadata("lmcache-cluster", "0.1.0", "Apache-2.0")


def image(path: Path, files: dict[str, str], links: dict[str, str] | None = None) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return path


@pytest.fixture
def document(tmp_path):
    files = image(
        tmp_path / "files.tar",
        {
            "var/lib/dpkg/status": STATUS,
            f"{SITE}/numpy-2.3.5.dist-info/METADATA": metadata("numpy", "2.3.5"),
            "opt/lmcache/payload/cp312/numpy-2.3.5.dist-info/METADATA": metadata("numpy", "2.3.5"),
            f"{SITE}/numpy-2.3.5.dist-info/RECORD": "",
            "opt/lmcache/project/lmcache_cluster-0.1.0.dist-info/METADATA": PROJECT,
            "usr/share/doc/glibc/copyright": FREE_TEXT,
            "./usr/share/doc/zlib1g/copyright": FIELDS,
        },
        {"usr/share/doc/libc6": "glibc"},
    )
    return json.loads(sbom("sidecar", DIGEST, files, LOCKED))


def test_sbom_has_installed_packages_only(document):
    assert document["metadata"]["component"]["version"] == DIGEST
    assert [component["purl"] for component in document["components"]] == [
        "pkg:pypi/lmcache-cluster@0.1.0", "pkg:pypi/numpy@2.3.5", "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10",
        "pkg:deb/debian/zlib1g@1%3A1.2.13.dfsg-1",
    ]  # fmt: skip


def test_python_package_has_licence_hashes_and_folders(document):
    numpy = document["components"][1]
    assert numpy["licenses"] == [{"expression": "BSD-3-Clause"}]
    assert [entry["content"] for entry in numpy["externalReferences"][0]["hashes"]] == ["1" * 64, "2" * 64]
    assert [entry["value"] for entry in numpy["properties"]] == ["/opt/lmcache/payload/cp312", f"/{SITE}"]


def test_debian_packages_have_the_licences_of_their_copyright_files(document):
    licences = [
        [entry["license"]["name"] for entry in each["licenses"]] for each in document["components"][2:]
    ]
    assert licences == [["CC0-1.0", "GPL-2", "LGPL-2.1"], ["GPL-2+ with OpenSSL exception", "Zlib"]]


@pytest.mark.parametrize(
    ("name", "version", "problem"),
    [("numpy", "2.3.4", "the lock file has 2.3.5"), ("evil", "1.0", "the lock file does not have it")],
)
def test_package_that_is_not_locked_is_refused(tmp_path, name, version, problem):
    files = image(tmp_path / "files.tar", {f"{SITE}/x.dist-info/METADATA": metadata(name, version)})
    with pytest.raises(SbomError, match=f"{name} {version} in /{SITE}, and {problem}"):
        sbom("sidecar", DIGEST, files, LOCKED)


def test_lock_files_have_hashes_of_all_packages():
    for name in ("operator", "router", "sidecar"):
        assert image_locks(name)
        assert all(lock.sha256 for lock in image_locks(name).values())


SOURCE = statement.Source("https://github.com/o/r", "1" * 40, 1_700_000_000)
LOCK_FILE = ROOT / "sidecar" / "requirements.txt"


def test_provenance_names_commit_lock_files_and_base():
    text = statement.provenance("sidecar", "0.1.0", SOURCE, [LOCK_FILE], ("debian:bookworm-slim", DIGEST), {})
    build = json.loads(text)["buildDefinition"]
    git_url = f"git+https://github.com/o/r@{'1' * 40}"
    locked = hashlib.sha256(LOCK_FILE.read_bytes()).hexdigest()
    assert build["externalParameters"] == {"artifact": "sidecar", "version": "0.1.0", "source": git_url}
    assert build["resolvedDependencies"] == [
        {"uri": git_url, "digest": {"gitCommit": "1" * 40}},
        {"uri": f"{git_url}#sidecar/requirements.txt", "digest": {"sha256": locked}},
        {"uri": "docker://debian:bookworm-slim", "digest": {"sha256": "a" * 64}},
    ]
    assert json.loads(text)["runDetails"] == {"builder": {"id": statement.LOCAL_BUILDER}}


def test_builder_is_the_workflow_on_github():
    environment = {
        "GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "o/r", "GITHUB_RUN_ID": "7",
        "GITHUB_WORKFLOW_REF": "o/r/.github/workflows/release.yml@refs/tags/v0.1.0",
    }  # fmt: skip
    run = json.loads(statement.provenance("chart", "0.1.0", SOURCE, [], None, environment))["runDetails"]
    assert run["builder"]["id"] == "https://github.com/o/r/.github/workflows/release.yml@refs/tags/v0.1.0"
    assert run["metadata"]["invocationId"] == "https://github.com/o/r/actions/runs/7/attempts/1"
