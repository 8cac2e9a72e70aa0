"""Create ``.gpu/``: what a GPU machine without network lacks to run this project's checks.

Run this on a machine with a package registry. Then copy the checkout with ``.gpu`` to the GPU machine, and
run ``sh .gpu/run.sh`` there.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tools.cache import cached_directory
from tools.gpu_bundle import archive, engine, lists, redis_server, wheels
from tools.gpu_bundle.lists import Requirement

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"
MAX_BYTES = 64 << 20
"""Limit for the checkout's files with the bundle."""
MAX_REDIS_BYTES = 4 << 20


def main() -> int:
    args = _arguments()
    bundle: Path = args.output
    shutil.rmtree(bundle, ignore_errors=True)
    bundle.mkdir(parents=True)
    choice = lists.choose(lists.installed(args.machine), with_vllm=args.engine is not None)
    shutil.copy(_packages(choice.packed, args.python), bundle / "packages.tar.xz")
    (bundle / "expected").write_text("\n".join(choice.expected) + "\n")
    if args.engine:
        shutil.copy(_engine(args.python, args.architecture), bundle / "engine.tar.xz")
    _pack_redis(bundle)
    for file in sorted(FILES.iterdir()):
        shutil.copy(file, bundle / file.name)
    (bundle / "python").write_text(f"{args.python}\n")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    (bundle / "commit").write_text(commit.stdout)
    return _report(bundle)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_bundle", description=__doc__)
    parser.add_argument("--engine", choices=["vllm"], help="also pack this engine")
    parser.add_argument("--python", default="3.12", help="Python of the GPU machine (default: %(default)s)")
    parser.add_argument(
        "--architecture",
        type=_architecture,
        default="9.0",
        help="compute capability of the GPU, for the engine's kernels (default: %(default)s, H100 and H200)",
    )
    parser.add_argument(
        "--machine",
        type=Path,
        default=lists.MACHINE,
        help="packages of the GPU machine: output of its `python3 -m pip freeze` (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / ".gpu",
        help="folder of the bundle; it is replaced (%(default)s)",
    )
    return parser.parse_args()


def _architecture(text: str) -> int:
    major, _, minor = text.partition(".")
    return int(major) * 10 + int(minor)


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[gpu-bundle] {text}", flush=True)


def _packages(packages: Sequence[Requirement], python: str) -> Path:
    """Return an archive of the packages. It is created once for these versions."""

    def fill(folder: Path) -> None:
        say(f"{len(packages)} packages for Python {python}: {' '.join(package.name for package in packages)}")
        wheels.install(packages, folder, python)

    texts = [python, wheels.PLATFORM, str(archive.FILTERS), *(package.text for package in packages)]
    return _cached_archive("packages", texts, fill)


def _engine(python: str, architecture: int) -> Path:
    """Return an archive of the engine. It is created once for a version and an architecture."""
    vllm = lists.vllm()

    def fill(folder: Path) -> None:
        say(f"vLLM {vllm.version}, about 340 MB to download once")
        wheels.install([vllm], folder, python)
        engine.cut(folder, architecture, say)

    sources = [(Path(__file__).parent / name).read_text() for name in ("engine.py", "fatbin.py")]
    return _cached_archive(
        "engine", [python, str(architecture), str(archive.FILTERS), vllm.text, *sources], fill
    )


def _cached_archive(name: str, texts: Sequence[str], fill: Callable[[Path], None]) -> Path:
    """Return an archive of the folder that ``fill`` fills, from the cache directory if possible."""

    def create(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            fill(Path(scratch))
            say(f"compressing {name}, up to 2 minutes")
            archive.write(Path(scratch), folder / "archive.tar.xz")

    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    path = cached_directory(f"gpu-bundle-{name}-{digest}", create) / "archive.tar.xz"
    say(f"{name}: {path.stat().st_size / 2**20:.1f} MiB")
    return path


def _pack_redis(bundle: Path) -> None:
    """Add this machine's ``redis-server`` if there is one, and if it is small."""
    path = bundle / "redis.tar.xz"
    with tempfile.TemporaryDirectory() as scratch:
        if not redis_server.pack(Path(scratch)):
            say("redis-server is missing: apt-get install redis-server. Without it, no check uses Redis")
            return
        archive.write(Path(scratch), path)
    num_bytes = path.stat().st_size
    if num_bytes > MAX_REDIS_BYTES:
        path.unlink()
        say(f"redis-server with its libraries has {num_bytes / 2**20:.1f} MiB: it is left out")
        return
    say(f"redis: {num_bytes / 2**20:.1f} MiB")


def _report(bundle: Path) -> int:
    """Print the sizes. Returns 1 if the checkout with the bundle is too large."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    tree = [ROOT / os.fsdecode(name) for name in listed.stdout.split(b"\0") if name]
    tree_bytes, bundle_bytes = (_num_bytes(files) for files in (tree, bundle.rglob("*")))
    total = tree_bytes + bundle_bytes
    say(f"{bundle}: {bundle_bytes / 2**20:.1f} MiB, with the checkout {total / 2**20:.1f} MiB (limit 64)")
    if total > MAX_BYTES:
        say("too large: list the machine's packages with --machine, or remove large untracked files")
        return 1
    say(f"Copy the checkout with {bundle.name} to the GPU machine. Run there: sh {bundle.name}/run.sh")
    return 0


def _num_bytes(files: Iterable[Path]) -> int:
    return sum(file.stat().st_size for file in files if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
