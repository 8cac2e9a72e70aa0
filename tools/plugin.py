"""Build the archives of ``kubectl lmcache`` for krew, and the plugin's manifest.

    python -m tools.plugin OUT --version 0.1.0 --url https://github.com/OWNER/REPOSITORY/releases/download/v0.1.0

    OUT/kubectl-lmcache-linux-amd64.tar.gz      one archive per platform
        kubectl-lmcache                         starts the command with the user's Python
        kubectl_complete-lmcache                the same, for completion
        lib/common/                             this project's code, and packages that are only Python
        lib/cp311/                              packages with compiled modules, for one Python each
    OUT/lmcache.yaml                            the manifest

Limits: the user's Python is 3.11-3.14, on Linux with glibc or on macOS. An archive contains no Python.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.cache import uv
from tools.payload import copy_packages

ROOT = Path(__file__).resolve().parent.parent
PINS = ROOT / "operator" / "requirements.txt"
NAME = "lmcache"
PROGRAMS = {
    "kubectl-lmcache": "lmcache_cli.__main__",
    "kubectl_complete-lmcache": "lmcache_cli.completion",
}
PACKAGES = ("sidecar/lmcache_store", "operator/lmcache_cli", "operator/lmcache_operator")
"""Our packages in the archives, as folders of the checkout."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = {
    "linux-amd64": "x86_64-manylinux_2_28",
    "linux-arm64": "aarch64-manylinux_2_28",
    "darwin-amd64": "x86_64-apple-darwin",
    "darwin-arm64": "aarch64-apple-darwin",
}
"""Platforms of krew, with uv's names."""
COMPILED = (
    "aiohttp", "charset-normalizer", "frozenlist", "multidict", "propcache", "pydantic-core", "pyyaml",
    "yarl",
)  # fmt: skip
"""Packages with compiled modules. All other packages of the operator are only Python."""
_LAUNCHER = """\
#!/usr/bin/env python3
# Starts a program of kubectl lmcache. Old Pythons must be able to parse this file, to say what is wrong.
import os
import sys

lib = os.path.join(os.path.dirname(os.path.realpath(__file__)), "lib")
version = "%d.%d" % sys.version_info[:2]
native = os.path.join(lib, "cp" + version.replace(".", ""))
if not os.path.isdir(native):
    sys.exit("kubectl lmcache: python3 on your PATH is Python " + version + ", and this package needs "
             "{pythons}. Put one of these first on the PATH, or: pipx install 'lmcache-cluster[operator]'")
sys.path[:1] = [os.path.join(lib, "common"), native]
from {module} import main

sys.exit(main())
"""
_MANIFEST = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: {name}
spec:
  version: v{version}
  homepage: {homepage}
  shortDescription: Understand the KV cache of LLM inference pods
  description: |
    Answers questions about an LMCacheCluster, the KV cache of LLM inference pods:
    is it healthy, what does it do at present, why was a prompt computed, which
    size pays off, and what do the logs say.
  caveats: |
    The plugin needs Python {first}-{last} as python3 on your PATH.
    To complete its words in your shell, link kubectl_complete-lmcache from
    ~/.krew/store/{name}/v{version} into a directory of your PATH.
  platforms:
"""
_PLATFORM = """\
  - selector:
      matchLabels:
        os: {os}
        arch: {arch}
    uri: {uri}
    sha256: "{sha256}"
    bin: kubectl-lmcache
"""


def build(
    out: Path,
    version: str,
    url: str,
    platforms: Sequence[str] = tuple(PLATFORMS),
    pythons: Sequence[str] = PYTHONS,
) -> list[Path]:
    """Build the archives and the manifest in a new folder. Returns their paths, the manifest last.

    Args:
        out: folder, which must not exist.
        version: version without "v".
        url: address below which the archives will be.
        platforms: keys of `PLATFORMS`.
        pythons: versions of Python that the archives support.
    """
    out.mkdir(parents=True)
    archives = {platform: out / f"kubectl-lmcache-{platform}.tar.gz" for platform in platforms}
    with tempfile.TemporaryDirectory() as scratch:
        common = Path(scratch) / "common"
        _make_common(common, next(iter(platforms)), pythons[0])
        for platform, archive in archives.items():
            tree = Path(scratch) / platform
            for python in pythons:
                folder = tree / "lib" / f"cp{python.replace('.', '')}"
                _install(folder, platform, python, [name for name in _pinned() if name in COMPILED])
            for program, module in PROGRAMS.items():
                text = _LAUNCHER.format(module=module, pythons=", ".join(pythons))
                (tree / program).write_text(text)
            shutil.copy(ROOT / "LICENSE", tree)
            pack(archive, {"": tree, "lib/common": common})
    sums = {name: hashlib.sha256(archive.read_bytes()).hexdigest() for name, archive in archives.items()}
    path = out / f"{NAME}.yaml"
    path.write_text(manifest(version, url, sums, pythons))
    return [*archives.values(), path]


def manifest(version: str, url: str, sums: Mapping[str, str], pythons: Sequence[str] = PYTHONS) -> str:
    """Return krew's manifest as YAML. ``sums``: SHA-256 of the archives by platform."""
    text = _MANIFEST.format(
        name=NAME,
        version=version,
        homepage=url.partition("/releases/")[0],
        first=pythons[0],
        last=pythons[-1],
    )
    for platform, digest in sums.items():
        system, _, processor = platform.partition("-")
        text += _PLATFORM.format(
            os=system, arch=processor, uri=f"{url}/kubectl-lmcache-{platform}.tar.gz", sha256=digest
        )
    return text


def _make_common(common: Path, platform: str, python: str) -> None:
    """Create the part that is the same on all platforms."""
    _install(common, platform, python, [name for name in _pinned() if name not in COMPILED])
    if compiled := [*common.rglob("*.so"), *common.rglob("*.dylib")]:
        raise ValueError(f"{compiled[0].relative_to(common)} is compiled: add its package to COMPILED")
    subprocess.run([ROOT / "tools" / "images" / "slim.sh", common], check=True)
    copy_packages(common, PACKAGES)


def _pinned() -> dict[str, str]:
    """Return the pins of the operator's packages with their hashes, by name."""
    pins = re.split(r"\n(?=\S)", PINS.read_text().strip())
    return {pin.partition("==")[0]: pin for pin in pins}


def _install(folder: Path, platform: str, python: str, names: Sequence[str]) -> None:
    """Install pinned packages. Raises CalledProcessError if one has no wheel for the platform and Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as requirements:
        requirements.write("\n".join(_pinned()[name] for name in names))
        requirements.flush()
        subprocess.run(
            [
                uv(), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:",
                f"--python-version={python}", f"--python-platform={PLATFORMS[platform]}",
                "--target", folder, "--requirements", requirements.name,
            ],
            check=True,
        )  # fmt: skip


def pack(archive: Path, trees: Mapping[str, Path]) -> None:
    """Write an archive that depends on nothing but the files. ``trees``: folders by their path in it."""
    files = {
        os.path.join(prefix, path.relative_to(tree)): path
        for prefix, tree in trees.items()
        for path in tree.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.name != ".lock"
    }
    with (
        archive.open("wb") as raw,
        gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as compressed,
        tarfile.open(mode="w", fileobj=compressed) as tar,
    ):
        for name, path in sorted(files.items()):
            member = tarfile.TarInfo(name)  # a regular file: krew extracts no links
            member.size, member.mode = path.stat().st_size, 0o755 if name in PROGRAMS else 0o644
            with path.open("rb") as content:
                tar.addfile(member, content)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--version", required=True)
    parser.add_argument("--url", required=True)
    parser.add_argument("--platform", nargs="+", choices=PLATFORMS, default=tuple(PLATFORMS))
    parser.add_argument("--python", nargs="+", default=PYTHONS, metavar="X.Y")
    options = parser.parse_args()
    for path in build(options.out, options.version, options.url, options.platform, options.python):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


if __name__ == "__main__":
    main()
