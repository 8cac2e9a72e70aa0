"""The payload as the sidecar's image carries it: real wheels, imported by each Python that engines run on."""

import os
import subprocess
from pathlib import Path

import pytest

from tools import payload
from tools.cache import uv


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("payload") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UV", str(uv()))
        payload.make(out)
    return out


def python(version: str) -> str:
    """An interpreter of that version, if this machine has one: pyenv's, or one that uv finds."""
    if own := sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python")):
        return str(own[-1])
    argv = [uv(), "python", "find", "--no-project", "--no-python-downloads", version]
    found = subprocess.run(argv, capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"no Python {version} on this machine")
    return found.stdout.strip()


@pytest.mark.parametrize("version", payload.PYTHONS)
def test_client_imports_with_nothing_but_the_payload(out, version):
    code = (
        "import lmcache, sys; from lmcache.rpc import kvcache_pb2; import grpc, google.protobuf;"
        "print(grpc.__version__, google.protobuf.__version__, *sys.version_info[:2])"
    )
    env = {**os.environ, "PYTHONPATH": str(out)}
    argv = [python(version), "-S", "-c", code]
    done = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True)
    pins = dict(pin.split("==") for pin in payload.pins())
    wanted = [pins["grpcio"], pins["protobuf"], *version.split(".")]
    assert done.stdout.split() == wanted, done.stderr


def test_nothing_of_the_payload_but_the_library_can_hide_what_an_engine_brings(out):
    assert {path.name for path in out.iterdir()} == {"lmcache", "lmcache_bundled"}


def test_payload_copies_with_plain_cp(out, tmp_path):
    """How the init container hands it over: no links that break, nothing that only root can read."""
    subprocess.run(["cp", "-r", f"{out}/.", tmp_path / "copy"], check=True)
    copied = [
        path
        for path in (tmp_path / "copy").rglob("*")
        if path.is_symlink() or not path.stat().st_mode & 0o004
    ]
    assert copied == []
