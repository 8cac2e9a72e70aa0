"""The payload: the folder from which engines import the client."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import payload


@pytest.fixture
def out(tmp_path: Path) -> Path:
    payload.copy_packages(tmp_path / "out")
    return tmp_path / "out"


def run(out: Path, code: str) -> str:
    """Output of ``code`` in a Python that has only the standard library and the payload."""
    env = {**os.environ, "PYTHONPATH": str(out)}
    argv = [sys.executable, "-S", "-c", code]
    return subprocess.run(argv, env=env, cwd="/", check=True, capture_output=True, text=True).stdout.strip()


def add_bundled(out: Path, name: str, text: str) -> None:
    folder = out / "lmcache_bundled" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def test_payload_contains_whole_packages_without_build_files(out):
    copied = {path.relative_to(out) for path in out.rglob("*.py")}
    folders = [payload.ROOT / package for package in payload.PACKAGES]
    assert copied == {path.relative_to(folder.parent) for folder in folders for path in folder.rglob("*.py")}
    assert not [path for path in out.rglob("*") if path.suffix in (".pyc", ".proto", ".pyi")]


def test_client_imports_without_bundled_packages(out):
    file = run(out, "import lmcache_client; print(lmcache_client.__file__)")
    assert file == str(out / "lmcache_client" / "__init__.py")


def test_bundled_packages_are_importable_and_have_lowest_priority(out):
    add_bundled(out, "only_bundled", "where = 'payload'")
    add_bundled(out, "json", "where = 'payload'")
    code = "import lmcache_client, only_bundled, json; print(only_bundled.where, hasattr(json, 'where'))"
    assert run(out, code) == "payload False"


def test_packages_of_another_python_version_are_not_importable(out):
    (out / "lmcache_bundled" / "cp399").mkdir(parents=True)
    assert run(out, "import sys, lmcache_client; print(any('bundled' in p for p in sys.path))") == "False"


def test_bundled_packages_have_the_tested_versions():
    assert [pin.partition("==")[0] for pin in payload.pins()] == list(payload.BUNDLED)


def test_missing_pin_is_reported(monkeypatch, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("grpcio==1.0\n")
    monkeypatch.setattr(payload, "PINS", pins)
    with pytest.raises(ValueError, match=r"protobuf, typing-extensions"):
        payload.pins()
