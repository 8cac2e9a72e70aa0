"""Build images with buildah, in a separate store in the cache directory. Each content is built once.

The build needs no registry: debootstrap creates a replacement of ``debian:bookworm-slim`` from the same
packages. The Dockerfiles install packages from the sources of this machine's package managers.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from tools import debian
from tools.cache import cache_root, exclusive

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
BASE = "docker.io/library/debian:bookworm-slim"
SUITE = "bookworm"
MAX_ARCHIVES = 6
"""Limit for each image. Checkouts with different contents share one cache directory."""
MAX_LAYERS = 300
"""Limit of buildah's store. A change of the project adds about four layers, 15 MB together."""
EPOCH = 1_580_601_600
"""Time of all files in the images, in seconds: 2020-02-02, as in wheels of hatchling."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
MOUNTED_CERTIFICATES = "/run/certificates.crt"
_PACKAGES = {"buildah": "buildah", "debootstrap": "debootstrap"}


class ImagesError(RuntimeError):
    """An image can't be built here. The message says what to do."""


@dataclass(frozen=True)
class Recipe:
    """Source and limits of one image."""

    reference: str
    """The name that pods call it by."""
    folder: Path
    """Folder of the Dockerfile."""
    arguments: dict[str, str] = field(default_factory=dict)
    """Build arguments."""
    max_bytes: int | None = None
    """Limit of the uncompressed size."""

    def inputs(self) -> list[Path]:
        """Return the files that the image depends on: the Dockerfile, and the files that it copies."""
        dockerfile = self.folder / "Dockerfile"
        lines = dockerfile.read_text().splitlines()
        copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ") and "--from=" not in line]
        names = [name for sources in copies for name in sources]
        return [dockerfile, *(tracked(names) if names else [])]


@dataclass(frozen=True)
class Image:
    """An image that was built."""

    reference: str
    """The name that pods call it by."""
    archive: Path
    """The docker archive, for ``ctr images import``."""

    @property
    def size_bytes(self) -> int:
        """Uncompressed size of all layers."""
        return self.archive.stat().st_size


def _version() -> str:
    chart = (ROOT / "charts" / "lmcache-operator" / "Chart.yaml").read_text()
    return next(line.split()[1].strip('"') for line in chart.splitlines() if line.startswith("appVersion:"))


_ENVIRONMENT = {"VENV": str((ROOT / ".venv").resolve()), "PYTHON_HOME": sys.base_prefix}
"""Folders that tests mount into engines."""
IMAGES = {
    "pause": Recipe("localhost/pause:test", HERE / "pause"),
    "redis": Recipe("localhost/redis:test", HERE / "redis"),
    "engine": Recipe("localhost/engine:test", HERE / "engine", _ENVIRONMENT),
    "sglang": Recipe(
        "localhost/sglang:test",
        HERE / "sglang",
        _ENVIRONMENT | {"PYTHON": f"python3.{sys.version_info.minor}"},
    ),
    "operator": Recipe(
        f"ghcr.io/lmcache-cluster/operator:{_version()}", ROOT / "operator", max_bytes=200 << 20
    ),
    "router": Recipe(f"ghcr.io/lmcache-cluster/router:{_version()}", ROOT / "router", max_bytes=250 << 20),
    "sidecar": Recipe(f"ghcr.io/lmcache-cluster/sidecar:{_version()}", ROOT / "sidecar", max_bytes=250 << 20),
}


def tracked(names: list[str]) -> list[Path]:
    """Return the files under ``names`` that Git tracks or would track."""
    argv = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *names]
    listed = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return [path for name in sorted(set(listed)) if (path := ROOT / name).is_file()]


def build(name: str) -> Image:
    """Return the image of this checkout. Builds it if the cache lacks it. Raises `ImagesError`."""
    recipe = IMAGES[name]
    archive = _archive(name)
    with exclusive_store():
        if not archive.exists():
            _require_root()
            _limit_layers()
            _make_base()
            _make(name, recipe, archive)
            subprocess.run(["umount", _directory() / "store" / "overlay"], capture_output=True)
        os.utime(archive)
        _prune(name)
    return Image(recipe.reference, archive)


def exclusive_store() -> AbstractContextManager[None]:
    """Wait for builds of other processes, which may delete layers. They wait until the context ends."""
    return exclusive(_directory() / ".lock", _say)


def find(name: str) -> Image | None:
    """Return the image of this checkout, or None if the cache lacks it. Waits for no other process."""
    archive = _archive(name)
    return Image(IMAGES[name].reference, archive) if archive.exists() else None


def _archive(name: str) -> Path:
    return _directory() / f"{name}-{_digest(IMAGES[name])}.tar"


def _directory() -> Path:
    return cache_root() / "images"


def _digest(recipe: Recipe) -> str:
    digest = hashlib.sha256(repr((recipe.reference, recipe.arguments, _base_key())).encode())
    for path in recipe.inputs():
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_mode:o} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _base_key() -> str:
    return hashlib.sha256((HERE / "base.sh").read_bytes()).hexdigest()[:16]


def _require_root() -> None:
    if os.geteuid():
        raise ImagesError("building images needs root (mounts and chroot): run this with sudo")
    try:
        debian.install(_PACKAGES)
    except debian.PackagesError as error:
        raise ImagesError(str(error)) from error


def _say(text: str) -> None:
    print(f"[images] {text}", file=sys.stderr, flush=True)


def buildah(*arguments: str | Path, cwd: Path = ROOT) -> str:
    """Run buildah on the project's store. Raises `ImagesError` with the end of the output."""
    store = _directory() / "store"
    # A restart of the machine deletes /run, and with it the list of mounts.
    state = Path("/run") / f"lmcache-images-{hashlib.sha256(str(store).encode()).hexdigest()[:8]}"
    argv = ["buildah", "--root", store, "--runroot", state, "--storage-driver", "overlay", *arguments]
    done = subprocess.run([str(a) for a in argv], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise ImagesError(f"buildah {arguments[0]} failed:\n{tail}")
    return done.stdout.strip()


def _limit_layers() -> None:
    """Delete all layers if the store has too many. Buildah does not show which layers a build would reuse."""
    if len(buildah("images", "--all", "--quiet").split()) > MAX_LAYERS:
        buildah("rmi", "--all", "--force")


def _make_base() -> None:
    """Create the replacement of `BASE` if it is missing."""
    label = f"lmcache.base={_base_key()}"
    # By the label alone, layers would match that are left without the name.
    if buildah("images", "--quiet", "--filter", f"label={label}", "--filter", f"reference={BASE}"):
        return
    _say(f"creating {BASE} with debootstrap: about 90 s, once")
    start = time.monotonic()
    container = buildah("from", "scratch")
    try:
        root = Path(buildah("mount", container))
        argv = [HERE / "base.sh", SUITE, root, *_mirror()]
        done = subprocess.run([str(a) for a in argv], capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join((done.stdout + done.stderr).splitlines()[-10:])
            raise ImagesError(f"debootstrap failed (is Debian's mirror reachable?):\n{tail}")
        buildah("umount", container)
        buildah("config", "--label", label, "--cmd", "bash", container)
        buildah("commit", "--quiet", container, BASE)
    finally:
        buildah("rm", container)
    _say(f"{BASE}: {time.monotonic() - start:.0f} s")


def _mirror() -> list[str]:
    """Return the mirror from which apt gets the suite; empty: debootstrap chooses."""
    argv = ["apt-get", "indextargets", "--format", "$(RELEASE) $(REPO_URI)"]
    for line in subprocess.run(argv, capture_output=True, text=True).stdout.splitlines():
        release, _, uri = line.partition(" ")
        if release == SUITE:
            return [uri]
    return []


def _make(name: str, recipe: Recipe, archive: Path) -> None:
    _say(f"{name}: building")
    start = time.monotonic()
    bud(recipe, ROOT, recipe.reference)
    new = archive.with_suffix(".new")
    new.unlink(missing_ok=True)
    buildah("push", "--quiet", recipe.reference, f"docker-archive:{new}:{recipe.reference}")
    os.replace(new, archive)
    _say(f"{name}: {archive.stat().st_size / 2**20:.0f} MiB in {time.monotonic() - start:.0f} s")


def bud(recipe: Recipe, context: Path, tag: str, *further: str) -> None:
    """Build the Dockerfile of a recipe in a checkout, by buildah. Raises `ImagesError`.

    All files get the same time, so that two builds of equal content are equal.
    """
    arguments = dict(recipe.arguments)
    options = ["--timestamp", str(EPOCH), *further]
    if CERTIFICATES.exists():
        arguments |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), MOUNTED_CERTIFICATES)
        options += ["--volume", f"{CERTIFICATES}:{MOUNTED_CERTIFICATES}:ro"]
    for key, value in arguments.items():
        options += ["--build-arg", f"{key}={value}"]
    buildah(
        "bud", "--quiet", "--layers", "--isolation", "chroot", "--network", "host", "--pull-never", *options,
        "--tag", tag, "--file", context / recipe.folder.relative_to(ROOT) / "Dockerfile", context,
        cwd=context,
    )  # fmt: skip


def _prune(name: str) -> None:
    """Delete the least recently used archives."""
    archives = sorted(_directory().glob(f"{name}-*.tar"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in archives[MAX_ARCHIVES:]:
        path.unlink()
