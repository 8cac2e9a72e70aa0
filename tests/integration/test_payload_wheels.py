"""The payload with real wheels, as in the sidecar's image. Each supported Python imports it."""

import os
import subprocess
from pathlib import Path

import pytest

from tools import payload
from tools.cache import uv

pytestmark = pytest.mark.rotating("file")


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("payload") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV", str(uv()))
        payload.make(out)
    return out


def python(version: str) -> str:
    """An interpreter of that version from pyenv or uv. Skips the test if this machine has none."""
    if pyenv_pythons := sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        return str(pyenv_pythons[-1])
    argv = [uv(), "python", "find", "--no-project", "--no-python-downloads", version]
    completed = subprocess.run(argv, capture_output=True, text=True)
    if completed.returncode:
        pytest.skip(f"no Python {version} on this machine")
    return completed.stdout.strip()


@pytest.mark.parametrize("version", payload.PYTHONS)
def test_client_imports_with_nothing_but_the_payload(out, version):
    code = (
        "import sys; from lmcache_client.rpc import kvcache_pb2; import grpc, google.protobuf;"
        "print(grpc.__version__, google.protobuf.__version__, *sys.version_info[:2])"
    )
    env = {**os.environ, "PYTHONPATH": str(out)}
    argv = [python(version), "-S", "-c", code]
    completed = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True)
    pins = dict(pin.split()[0].split("==") for pin in payload.pins())
    expected = [pins["grpcio"], pins["protobuf"], *version.split(".")]
    assert completed.stdout.split() == expected, completed.stderr


def test_payload_has_no_other_top_level_names(out):
    assert {path.name for path in out.iterdir()} == {"lmcache_client", "lmcache_store", "lmcache_bundled"}


def test_payload_copies_with_plain_cp(out, tmp_path):
    """The init container copies the payload with cp: it has no broken links and is readable by every user."""
    subprocess.run(["cp", "-r", f"{out}/.", tmp_path / "copy"], check=True)
    copied = [
        path
        for path in (tmp_path / "copy").rglob("*")
        if path.is_symlink() or not path.stat().st_mode & 0o004
    ]
    assert copied == []
