"""The folder that engines import the client from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import payload


@pytest.fixture
def out(tmp_path: Path) -> Path:
    payload.copy_library(tmp_path / "out")
    return tmp_path / "out"


def run(out: Path, code: str) -> str:
    """Output of ``code`` in a Python that sees nothing but the standard library and the payload."""
    env = {**os.environ, "PYTHONPATH": str(out)}
    argv = [sys.executable, "-S", "-c", code]
    return subprocess.run(argv, env=env, cwd="/", check=True, capture_output=True, text=True).stdout.strip()


def bundled(out: Path, name: str, text: str) -> None:
    folder = out / "lmcache_bundled" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text)


def test_library_is_whole_and_has_no_build_leftovers(out):
    copied = {path.relative_to(out) for path in out.rglob("*.py")}
    assert copied == {path.relative_to(payload.ROOT) for path in (payload.ROOT / "lmcache").rglob("*.py")}
    assert not [path for path in out.rglob("*") if path.suffix in (".pyc", ".proto", ".pyi")]


def test_library_imports_with_nothing_bundled(out):
    assert run(out, "import lmcache; print(lmcache.__file__)") == str(out / "lmcache" / "__init__.py")


def test_bundled_packages_come_last_and_are_found(out):
    bundled(out, "only_bundled", "where = 'payload'")
    bundled(out, "json", "where = 'payload'")
    code = "import lmcache, only_bundled, json; print(only_bundled.where, hasattr(json, 'where'))"
    assert run(out, code) == "payload False"


def test_another_pythons_packages_are_not_seen(out):
    (out / "lmcache_bundled" / "cp399").mkdir(parents=True)
    assert run(out, "import sys, lmcache; print(any('bundled' in p for p in sys.path))") == "False"


def test_every_bundled_package_has_the_version_that_is_tested():
    assert [pin.partition("==")[0] for pin in payload.pins()] == list(payload.BUNDLED)


def test_a_missing_pin_is_said(monkeypatch, tmp_path):
    pins = tmp_path / "pins.txt"
    pins.write_text("grpcio==1.0\n")
    monkeypatch.setattr(payload, "PINS", pins)
    with pytest.raises(ValueError, match=r"protobuf, typing-extensions"):
        payload.pins()
