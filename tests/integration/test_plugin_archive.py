"""The archive of ``kubectl lmcache`` for krew, built from real wheels, as krew installs it."""

import hashlib
import os
import platform
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.harness.commands.krew import problems
from tools import plugin

pytestmark = pytest.mark.rotating("file")

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
PLATFORM = f"linux-{'arm64' if platform.machine() == 'aarch64' else 'amd64'}"
URL = "https://github.com/owner/repository/releases/download/v0.1.0"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("plugin") / "out"
    plugin.build(out, "0.1.0", URL, [PLATFORM], [PYTHON])
    return out


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A folder with the link that krew creates."""
    folder = tmp_path_factory.mktemp("krew")
    with tarfile.open(built / f"kubectl-lmcache-{PLATFORM}.tar.gz") as archive:
        assert all(member.isreg() for member in archive)  # krew extracts no links
        archive.extractall(folder / "store", filter="data")
    (folder / "bin").mkdir()
    (folder / "bin" / "kubectl-lmcache").symlink_to(folder / "store" / "kubectl-lmcache")
    (folder / "bin" / "kubectl_complete-lmcache").symlink_to(folder / "store" / "kubectl_complete-lmcache")
    return folder


def run(installed: Path, python: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the archive with a Python that has no packages of its own."""
    pythons = installed / "python"
    pythons.mkdir(exist_ok=True)
    (pythons / "python3").unlink(missing_ok=True)
    (pythons / "python3").write_text(f'#!/bin/sh\nexec {python} -S -E "$@"\n')
    (pythons / "python3").chmod(0o755)
    env = {"PATH": f"{pythons}:{installed / 'bin'}:/usr/bin:/bin", "HOME": str(installed)}
    return subprocess.run(words, env=env, capture_output=True, text=True, timeout=120)


def test_manifest_follows_krews_rules_and_names_the_archive(built):
    manifest = yaml.safe_load((built / "lmcache.yaml").read_text())
    assert list(problems("lmcache", manifest)) == []
    (entry,) = manifest["spec"]["platforms"]
    archive = built / f"kubectl-lmcache-{PLATFORM}.tar.gz"
    assert entry["sha256"] == hashlib.sha256(archive.read_bytes()).hexdigest()
    assert entry["uri"] == f"{URL}/{archive.name}"


def test_installed_plugin_runs_with_nothing_but_python(installed):
    shown = run(installed, sys.executable, "kubectl-lmcache", "--version")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "kubectl-lmcache 0.1.0\n", "")
    # The client and all its packages are imported before the kubeconfig is read.
    missing = run(installed, sys.executable, "kubectl-lmcache", "status", "--kubeconfig", "/missing")
    assert missing.returncode == 2
    assert "error: /missing: " in missing.stderr
    usage = run(installed, sys.executable, "kubectl-lmcache", "top", "--help").stdout
    assert usage.startswith("usage: kubectl lmcache top")
    assert run(installed, sys.executable, "kubectl_complete-lmcache", "to").stdout.endswith("\n:0\n")


def test_other_python_gets_a_sentence_that_says_what_to_do(installed):
    old_pythons = sorted(Path.home().glob(".pyenv/versions/*/bin/python"))
    old_pythons = [path for path in old_pythons if not path.parents[1].name.startswith(f"{PYTHON}.")]
    if not old_pythons:
        pytest.skip("no other Python on this machine")
    shown = run(installed, str(old_pythons[0]), "kubectl-lmcache", "status")
    assert shown.returncode == 1
    assert f"and this package needs {PYTHON}. Put one of these first on the PATH" in shown.stderr


def test_archive_depends_only_on_the_files(built, installed, tmp_path):
    archives = []
    for number in range(2):
        path = tmp_path / f"{number}.tar.gz"
        plugin.pack(path, {"": installed / "store"})
        archives.append(path.read_bytes())
        os.utime(installed / "store" / "LICENSE")
    assert archives[0] == archives[1]
