"""Where the Kubernetes programs come from: found, downloaded or built; whole or not at all."""

import dataclasses
import hashlib
import io
import os
import tarfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

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
    """An empty cache directory, and hosts that nobody reaches."""
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("KUBEBUILDER_ASSETS", raising=False)
    serve(monkeypatch, "http://127.0.0.1:9")  # the discard port: refused at once
    return tmp_path / "cache"


@pytest.fixture
def go(tmp_path, monkeypatch):
    """A stand-in for Go that builds in no time; its log has one line per build."""

    def install(fails: str = "") -> Path:
        folder, log = tmp_path / "go-bin", tmp_path / "go.log"
        folder.mkdir(exist_ok=True)
        (folder / "go").write_text(GO.format(log=log, fails=fails))
        (folder / "go").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return log

    return install


def serve(monkeypatch, url: str) -> None:
    """Let every download come from ``url`` instead of its publisher."""
    programs = {}
    for name, program in binaries.PROGRAMS.items():
        moved = {key: f"{url}/{getattr(program, key).rsplit('/', 1)[1]}"
                 for key in ("url", "checksums") if getattr(program, key)}  # fmt: skip
        programs[name] = dataclasses.replace(program, **moved)
    monkeypatch.setattr(binaries, "PROGRAMS", programs)


@pytest.fixture
def publisher(tmp_path, monkeypatch):
    """A host on loopback that offers what is put into the folder."""
    folder = tmp_path / "published"
    folder.mkdir()
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        serve(monkeypatch, f"http://127.0.0.1:{server.server_port}")
        yield folder
        server.shutdown()


def offer(folder: Path, name: str, body: bytes) -> None:
    """Publish a program as its publisher does, with its checksum."""
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
    alone = program.checksums.endswith(".sha256")
    text = digest if alone else f"{'0' * 64}  other\n{digest}  {file_name}\n"
    (folder / program.checksums.rsplit("/", 1)[1]).write_text(text)


def test_assets_of_the_user_come_first_if_they_hold_all_that_is_asked_for(tmp_path, monkeypatch, go):
    assets = tmp_path / "assets"
    assets.mkdir()
    for name in ("etcd", "kube-apiserver"):
        (assets / name).write_text("")
        (assets / name).chmod(0o755)
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(assets))
    go()
    assert binaries.directory(["etcd", "kube-apiserver"]) == assets
    assert binaries.directory(["etcd", "kwok"]) == binaries.cache_directory()


@pytest.mark.parametrize("binary", binaries.LINKS)
def test_programs_of_one_binary_are_links_to_it_and_it_is_built_once(go, binary):
    log, names = go(), binaries.LINKS[binary]
    folder = binaries.directory(names)
    assert {os.readlink(folder / name) for name in names} == {binary}
    assert binaries.directory(names) == folder
    assert len(log.read_text().splitlines()) == 1


def test_programs_that_share_the_packages_of_kubernetes_are_built_by_one_call(go):
    log = go()
    binaries.directory([*binaries.CONTROL_PLANE, "kubectl", "helm", "kwok"])
    (line,) = log.read_text().splitlines()
    assert "@" not in line  # a package at a version would be built with dependencies of its own
    assert "./node" not in line


def test_a_release_that_is_too_old_to_share_gets_helm_and_kwok_at_their_pins(monkeypatch):
    monkeypatch.setattr(binaries, "_required", lambda module: None)
    assert binaries._shared("sigs.k8s.io/kwok", "cmd/kwok", "v0.8.0") == "sigs.k8s.io/kwok/cmd/kwok@v0.8.0"


def test_what_only_a_node_needs_is_not_built_for_tests():
    assert not {"kubelet", "kube-proxy", "containerd"} & set(binaries.ALL)


def test_only_what_is_asked_for_is_built(go):
    log = go()
    assert binaries.path("kubeconform").read_text().endswith("built")
    assert "kubernetes" not in log.read_text().split()[-1]
    assert binaries.find(["kube-apiserver"]) is None


def test_two_callers_build_once(go):
    log = go()
    threads = [threading.Thread(target=binaries.path, args=("kwok",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log.read_text().splitlines()) == 1


def test_failed_build_says_why_and_leaves_nothing(go, cache):
    go(fails="yes")
    with pytest.raises(binaries.BinariesError, match=r"(?s)proxy reachable.*cannot find module"):
        binaries.path("kwok")
    assert [path.name for path in binaries.cache_directory().iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["kube-apiserver", "etcd", "helm"])
def test_download_is_checked_and_unpacked(publisher, name):
    offer(publisher, name, b"#!/bin/sh\necho official")
    path = binaries.path(name)
    assert path.read_bytes() == b"#!/bin/sh\necho official"
    assert os.access(path, os.X_OK)


def test_download_with_another_checksum_is_refused(publisher):
    offer(publisher, "kubectl", b"official")
    (publisher / "kubectl").write_bytes(b"tampered")
    with pytest.raises(binaries.BinariesError, match=r"does not have the published SHA-256"):
        binaries.path("kubectl")
    assert binaries.find(["kubectl"]) is None


def test_what_cannot_be_downloaded_is_built(publisher, go):
    go()
    assert binaries.path("helm").read_text().endswith("built")


def test_another_pin_gets_another_directory(monkeypatch):
    before = binaries.cache_directory()
    monkeypatch.setattr(binaries, "KWOK", "v0.9.0")
    assert binaries.cache_directory() != before


def test_unknown_program_is_named():
    with pytest.raises(binaries.BinariesError, match=r"unknown program kubelt; there are .*kubelet"):
        binaries.path("kubelt")
