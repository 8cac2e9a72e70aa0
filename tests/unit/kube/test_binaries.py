"""Sources of Kubernetes programs: found, downloaded or built. A failure leaves no partial result."""

import dataclasses
import hashlib
import io
import os
import sys
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import cache as tools_cache
from tools.kube import binaries

GO = """#!/bin/sh
[ "$1" = list ] && exit 0
echo "$@" >> "{log}"
[ -n "{fails}" ] && {{ echo "go: cannot find module"; exit 1; }}
while :; do case "$1" in -ldflags) shift 2;; -*|install) shift;; *) break;; esac; done
for package; do
  case "$package" in .) name=kube;; *) name=${{package##*/}}; name=${{name%%@*}};; esac
  printf '#!/bin/sh\\necho built' > "$GOBIN/$name"; chmod +x "$GOBIN/$name"
done
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache directory, and unreachable download hosts."""
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    serve(monkeypatch, "http://127.0.0.1:9")  # the discard port refuses connections at once
    return tmp_path / "cache"


@pytest.fixture
def fake_go(tmp_path, monkeypatch):
    """A fake Go program that builds at once. Its log has a line for each build."""

    def install(fails: str = "") -> Path:
        folder, log = tmp_path / "go-bin", tmp_path / "go.log"
        folder.mkdir(exist_ok=True)
        (folder / "go").write_text(GO.format(log=log, fails=fails))
        (folder / "go").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return install


def serve(monkeypatch, url: str) -> None:
    """Redirect all downloads to ``url``."""

    def redirected(program: Any) -> Any:
        known = {key: getattr(program, key) for key in ("url", "checksums") if getattr(program, key)}
        changed = {key: f"{url}/{value.rsplit('/', 1)[1]}" for key, value in known.items()}
        return dataclasses.replace(program, **changed)

    programs = {name: redirected(program) for name, program in binaries.PROGRAMS.items()}
    monkeypatch.setattr(binaries, "PROGRAMS", programs)


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """A local HTTP server that publishes the files of a folder."""
    folder = tmp_path / "published"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        serve(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()


def publish(folder: Path, name: str, body: bytes) -> None:
    """Publish a program with its checksum, as its publisher does."""
    program = binaries.PROGRAMS[name]
    file_name = program.url.rsplit("/", 1)[1]
    if file_name.endswith(".tar.gz"):
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
            info = tarfile.TarInfo(f"folder/{name}")
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
        body = buffer.getvalue()
    (folder / file_name).write_bytes(body)
    digest = hashlib.sha256(body).hexdigest()
    is_single_file = program.checksums.endswith(".sha256")
    text = digest if is_single_file else f"{'0' * 64}  other\n{digest}  {file_name}\n"
    (folder / program.checksums.rsplit("/", 1)[1]).write_text(text)


def test_users_assets_are_preferred_if_complete(tmp_path, monkeypatch, fake_go):
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver"):
        (assets / name).touch(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    fake_go()
    assert binaries.directory(["etcd", "kube-apiserver"]) == assets
    assert binaries.directory(["etcd", "kwok"]) == binaries.cache_directory()


def test_concurrent_callers_build_once(fake_go):
    log = fake_go()
    threads = [threading.Thread(target=binaries.path, args=("kwok",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.read_text().splitlines()) == 1


def test_failed_build_reports_the_reason_and_leaves_no_files(fake_go, cache):
    fake_go(fails="yes")
    with pytest.raises(binaries.BinariesError, match=r"(?s)proxy reachable.*cannot find module"):
        binaries.path("kwok")
    assert [path.name for path in binaries.cache_directory().iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["kube-apiserver", "etcd", "helm"])
def test_download_is_checked_and_unpacked(publisher, name):
    publish(publisher, name, b"#!/bin/sh\necho official")
    path = binaries.path(name)
    assert path.read_bytes() == b"#!/bin/sh\necho official"
    assert os.access(path, os.X_OK)


def test_download_with_wrong_checksum_is_refused(publisher):
    publish(publisher, "kubectl", b"official")
    (publisher / "kubectl").write_bytes(b"tampered")
    with pytest.raises(binaries.BinariesError, match=r"does not have the published SHA-256"):
        binaries.path("kubectl")
    assert binaries.find(["kubectl"]) is None


def test_failed_download_falls_back_to_a_build(publisher, fake_go):
    fake_go()
    assert binaries.path("helm").read_text().endswith("built")


def test_unknown_program_is_reported():
    with pytest.raises(binaries.BinariesError, match=r"unknown program kubelt; there are .*kubelet"):
        binaries.path("kubelt")


# -- the installer uv, also for programs that ``make`` did not start


def test_missing_uv_raises_error_with_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(FileNotFoundError, match="make setup"):
        tools_cache.uv()
