"""A release with a Docker that is not there: what it is told to build, and what the chart says afterwards."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from tools import release

DIGESTS = {"operator": "sha256:" + "a" * 64, "sidecar": "sha256:" + "b" * 64, "chart": "sha256:" + "c" * 64}


@pytest.fixture
def commands(monkeypatch):
    """Every command, recorded; buildx writes what it pushed, helm packs with tar."""
    calls = []

    def run(*argv):
        words = [str(word) for word in argv]
        calls.append(words)
        if "--metadata-file" in words:
            name = Path(words[words.index("--file") + 1]).parent.name
            metadata = Path(words[words.index("--metadata-file") + 1])
            metadata.write_text(json.dumps({"containerimage.digest": DIGESTS[name]}))
        if "package" in words:
            out = Path(words[-1])
            with tarfile.open(out / "lmcache-operator-0.1.0.tgz", "w:gz") as archive:
                archive.add(out / "lmcache-operator", "lmcache-operator")

    def push(words, **_):
        """What helm prints; other calls' results are not looked at."""
        if "push" in words:
            calls.append(words)
            with tarfile.open(words[2]) as archive:
                values = archive.extractfile("lmcache-operator/values.yaml")
                calls.append(["values", values.read().decode()])
        printed = f"Pushed: registry.example/x:0.1.0\nDigest: {DIGESTS['chart']}\n"
        return subprocess.CompletedProcess(words, 0, "", printed)

    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(release.subprocess, "run", push)
    monkeypatch.setattr(release.binaries, "path", lambda name: name)
    return calls


def test_the_chart_names_the_images_that_were_pushed_by_digest(commands, tmp_path):
    release.release("0.1.0", "registry.example/me", tmp_path / "digests")
    values = yaml.safe_load(next(call[1] for call in commands if call[0] == "values"))
    assert values["image"]["repository"] == "registry.example/me/operator"
    assert values["image"]["digest"] == DIGESTS["operator"]
    assert values["defaults"]["sidecarImage"] == f"registry.example/me/sidecar:0.1.0@{DIGESTS['sidecar']}"
    assert (tmp_path / "digests").read_text() == "".join(f"{k}={v}\n" for k, v in DIGESTS.items())
    assert commands[-2][:2] == ["helm", "push"]
    assert commands[-2][-1] == "oci://registry.example/me/charts"


def test_images_carry_sbom_and_provenance(commands):
    release.release("0.1.0", "registry.example/me", None)
    builds = [call for call in commands if "--metadata-file" in call]
    assert len(builds) == 2
    assert all({"--push", "--sbom=true", "--provenance=mode=max"} <= set(call) for call in builds)


@pytest.mark.parametrize(("status", "printed"), [(1, "Error: denied"), (0, "Pushed: x")])
def test_a_chart_that_may_not_be_there_ends_the_release(monkeypatch, status, printed):
    done = subprocess.CompletedProcess([], status, "", printed)
    monkeypatch.setattr(release.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(release.binaries, "path", lambda name: name)
    with pytest.raises(release.ReleaseError, match=rf"(?s)failed: helm push .*{printed}"):
        release.push_chart(release.ROOT / "x.tgz", "registry.example/me")


def test_another_version_than_the_project_s_publishes_nothing(commands):
    with pytest.raises(release.ReleaseError, match=r"Chart.yaml is not of version 9.9.9"):
        release.release("9.9.9", "registry.example/me", None)
    assert not commands
