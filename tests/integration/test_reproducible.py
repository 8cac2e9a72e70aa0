"""Two builds of equal files are equal: in other folders, at other times, and with another umask."""

import hashlib
import subprocess
from pathlib import Path

import pytest

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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return build(copy(folder / "a", 0o022, 1_000_000_000, IMAGE_SOURCES), folder / "out")


def test_wheel_is_reproducible(wheel, tmp_path):
    assert (
        build(copy(tmp_path / "another-folder", 0o077, 1_700_000_000, IMAGE_SOURCES), tmp_path / "out")
        == wheel
    )


def test_wheel_shows_a_changed_file(wheel, tmp_path):
    source = copy(tmp_path / "a", 0o022, 1_000_000_000, IMAGE_SOURCES)
    with (source / "sidecar" / "lmcache_client" / "__init__.py").open("a") as file:
        file.write("# changed\n")
    assert build(source, tmp_path / "out").items().isdisjoint(wheel.items())


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
