"""Requirements of the images equal the versions that the tests use."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
BUILD = "tools/requirements/build.txt"
SHARED = ("numpy", "xxhash", "grpcio", "protobuf")
"""Packages of the storage core, which the operator does not need."""


def pins(*names: str) -> dict[str, str]:
    text = "\n".join((ROOT / name).read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_installed_versions_are_the_tested_versions(image):
    tested = pins("tools/requirements/dev.txt", "tools/requirements/torch.txt")
    installed = pins(f"{image}/requirements.txt")
    assert installed
    assert {name: tested.get(name) for name in installed} == installed


def test_operator_installs_no_package_of_the_data_path():
    assert not set(pins("operator/requirements.txt")) & set(SHARED)
    assert set(pins("sidecar/requirements.txt")) >= set(SHARED)


FILES = sorted([*ROOT.glob("tools/requirements/*.txt"), *ROOT.glob("*/requirements.txt")])


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_requirements_are_pinned_by_hash(path):
    lines = path.read_text().replace("\\\n", " ").splitlines()
    hashed = re.compile(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+")
    assert lines
    assert [line for line in lines if not hashed.fullmatch(line)] == []


def test_setup_accepts_packages_with_these_hashes_only():
    """Set-up installs an editable project, which has no hash, and files with hashes."""
    script = (ROOT / "tools/setup.sh").read_text()
    assert re.findall(r"\binstall (--(?!quiet).*?); }", script) == [
        '--require-hashes --requirements "tools/requirements/$1.txt"',
        "--build-constraint tools/requirements/build.txt --editable .",
    ]
    assert len(re.findall(r'uv" pip install\b', script)) == 1  # in the function of this name


def test_build_backend_is_pinned():
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    of_editable_projects = "editables"
    assert {*backend, "uv", of_editable_projects} <= set(pins(BUILD))
