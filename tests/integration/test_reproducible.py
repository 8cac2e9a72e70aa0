"""Two builds of equal files are equal: in other folders, at other times, and with another umask."""

import hashlib
import subprocess
from pathlib import Path

from tests.harness.checkouts import IMAGE_SOURCES, copy
from tools import payload, release
from tools.cache import uv
from tools.kube import binaries
from tools.provenance.distributions import IMAGES

ROOT = Path(__file__).resolve().parents[2]


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def build(source: Path, out: Path) -> dict[str, str]:
    options = [
        "--quiet",
        "--wheel",
        "--require-hashes",
        "--build-constraint",
        ROOT / "tools/requirements/build.txt",
    ]
    subprocess.run([uv(), "build", *options, "--out-dir", out, source], check=True)
    (out / ".gitignore").unlink(missing_ok=True)
    return digests(out)


def test_wheel_is_reproducible(tmp_path):
    results = []
    for name, umask, seconds in (("a", 0o022, 1_000_000_000), ("b", 0o077, 1_700_000_000)):
        results.append(build(copy(tmp_path / name, umask, seconds, IMAGE_SOURCES), tmp_path / f"{name}-out"))
    assert results[0] == results[1]


def test_charts_archive_is_reproducible(tmp_path, monkeypatch):
    binaries.path("helm")
    images = dict.fromkeys(IMAGES, "sha256:" + "1" * 64)
    results = []
    for name, umask, seconds in (("a", 0o022, 1_000_000_000), ("b", 0o077, 1_700_000_000)):
        source, out = copy(tmp_path / name, umask, seconds, ["charts"]), tmp_path / f"{name}-out"
        out.mkdir()
        monkeypatch.setattr(release, "CHART", source / "charts" / "lmcache-operator")
        results.append(release.pack_chart("0.1.0", "r.example/me", images, out).read_bytes())
    assert results[0] == results[1]


def test_engines_can_read_the_client_of_a_private_checkout(tmp_path, monkeypatch):
    private = copy(tmp_path / "private", 0o077, 1_000_000_000, [*payload.PACKAGES])
    monkeypatch.setattr(payload, "ROOT", private)
    payload.copy_packages(tmp_path / "out")
    copied = [*(tmp_path / "out").rglob("*")]
    assert copied
    assert {path.stat().st_mode & 0o777 for path in copied} == {0o644, 0o755}
