"""A release with fake Docker and Helm: the executed commands, and the values of the published chart."""

import json
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from tests.harness.commands import krew
from tools import plugin, release
from tools.kube import binaries
from tools.provenance import evidence, programs, statement

NAMES = ("operator", "router", "sidecar", "chart")
DIGESTS = {name: "sha256:" + digit * 64 for name, digit in zip(NAMES, "abcd", strict=True)}


BASE = "sha256:" + "e" * 64
SOURCE = statement.Source("https://github.com/o/r", "1" * 40, 1_700_000_000)


@pytest.fixture
def commands(monkeypatch):
    """All recorded commands. Buildx writes the digest that it pushed, and Helm packages with tar.

    The commands of cosign and crane run in tests/release.
    """
    calls = []
    monkeypatch.setattr(statement, "source", lambda: SOURCE)
    monkeypatch.setattr(statement, "check_clean", lambda: None)
    monkeypatch.setattr(evidence, "image_sbom", lambda name, artifact: f"{name} {artifact.digest}")

    def run_program(*argv, **_):
        calls.append([str(word) for word in argv])
        if argv[0] == "cosign" and "bad" in argv:
            raise programs.ProgramError("bad key")
        return f"{BASE}\n" if argv[:2] == ("crane", "digest") else ""

    monkeypatch.setattr(programs, "run", run_program)

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
        """Return Helm's output. Results of other commands are not used."""
        if "push" in words:
            calls.append(words)
            with tarfile.open(words[2]) as archive:
                values = archive.extractfile("lmcache-operator/values.yaml")
                calls.append(["values", values.read().decode()])
        printed = f"Pushed: registry.example/x:0.1.0\nDigest: {DIGESTS['chart']}\n"
        return subprocess.CompletedProcess(words, 0, "", printed)

    monkeypatch.setattr(release, "run", run)
    monkeypatch.setattr(subprocess, "run", push)
    monkeypatch.setattr(binaries, "path", lambda name: name)
    return calls


def test_chart_refers_to_pushed_images_by_digest(commands, tmp_path):
    release.release("0.1.0", "registry.example/me", tmp_path / "digests")
    values = yaml.safe_load(next(call[1] for call in commands if call[0] == "values"))
    assert values["image"]["repository"] == "registry.example/me/operator"
    assert values["image"]["digest"] == DIGESTS["operator"]
    assert values["defaults"]["sidecarImage"] == f"registry.example/me/sidecar:0.1.0@{DIGESTS['sidecar']}"
    assert values["defaults"]["routerImage"] == f"registry.example/me/router:0.1.0@{DIGESTS['router']}"
    assert (tmp_path / "digests").read_text() == "".join(f"{k}={v}\n" for k, v in DIGESTS.items())
    assert (commands[-2][:2], commands[-2][-1]) == (["helm", "push"], "oci://registry.example/me/charts")


def test_images_depend_only_on_base_and_commit(commands):
    release.release("0.1.0", "registry.example/me", None)
    builds = [call for call in commands if "--metadata-file" in call]
    assert len(builds) == 3
    base = f"debian:bookworm-slim=docker-image://docker.io/library/debian@{BASE}"
    epoch, output = "SOURCE_DATE_EPOCH=1700000000", "type=registry,rewrite-timestamp=true"
    assert all({base, epoch, output, "--provenance=false"} <= set(call) for call in builds)
    assert [call[2:] for call in commands if call[:2] == ["crane", "digest"]] == [[release.BASE]]


def test_all_artifacts_are_signed_by_digest_with_their_statements(commands, tmp_path):
    release.release("0.1.0", "r.example/me", None, "cosign.key", tmp_path)
    signed = {call[-1] for call in commands if call[:2] == ["cosign", "sign"]}
    paths = {name: name for name in NAMES} | {"chart": "charts/lmcache-operator"}
    assert signed == {f"r.example/me/{paths[name]}@{digest}" for name, digest in DIGESTS.items()}
    attested = [(call[call.index("--type") + 1], call[-1]) for call in commands if "attest" in call]
    assert {reference for kind, reference in attested if kind == "slsaprovenance1"} == signed
    assert len([kind for kind, _ in attested if kind == "cyclonedx"]) == 3
    assert (tmp_path / "sidecar.cdx.json").read_text() == f"sidecar {DIGESTS['sidecar']}"


def test_release_without_key_is_unsigned_and_says_so(commands, capsys):
    release.release("0.1.0", "r.example/me", None)
    assert not [call for call in commands if call[0] == "cosign"]
    assert "not signed" in capsys.readouterr().out


def test_bad_key_publishes_nothing(commands):
    with pytest.raises(programs.ProgramError, match="bad key"):
        release.release("0.1.0", "r.example/me", None, "bad")
    assert not [call for call in commands if call[0] == "docker"]


def test_empty_key_is_refused(commands, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["release", "--version", "0.1.0", "--registry", "r", "--key", ""])
    with pytest.raises(SystemExit):
        release.main()
    assert "--key is empty" in capsys.readouterr().err
    assert commands == []


def test_uncommitted_change_publishes_nothing(commands, monkeypatch):
    monkeypatch.undo()
    changed = " M sidecar/lmcache_store/keys.py"
    monkeypatch.setattr(statement, "git", lambda *arguments: changed if "status" in arguments else "1")
    with pytest.raises(statement.SourceError, match=rf"first '{changed}': commit them"):
        release.release("0.1.0", "r.example/me", None, "cosign.key")


@pytest.mark.parametrize(("status", "printed"), [(1, "Error: denied"), (0, "Pushed: x")])
def test_failed_chart_push_stops_the_release(monkeypatch, status, printed):
    completed = subprocess.CompletedProcess([], status, "", printed)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: completed)
    monkeypatch.setattr(binaries, "path", lambda name: name)
    with pytest.raises(release.ReleaseError, match=rf"(?s)failed: helm push .*{printed}"):
        release.push_chart(release.ROOT / "x.tgz", "registry.example/me")


def test_version_mismatch_publishes_nothing(commands):
    with pytest.raises(release.ReleaseError, match=r"Chart.yaml is not of version 9.9.9"):
        release.release("9.9.9", "registry.example/me", None)
    assert not commands


def test_manifest_of_the_plugin_covers_all_platforms_and_follows_krews_rules():
    sums = dict.fromkeys(plugin.PLATFORMS, "0" * 64)
    url = "https://github.com/o/r/releases/download/v0.1.0"
    manifest = yaml.safe_load(plugin.manifest("0.1.0", url, sums))
    assert (list(krew.problems("lmcache", manifest)), len(manifest["spec"]["platforms"])) == ([], 4)
    assert manifest["spec"]["homepage"] == "https://github.com/o/r"


def test_failed_plugin_publishes_nothing(commands, monkeypatch, tmp_path):
    argv = ["release", "--version", "0.1.0", "--registry", "r", "--url", "https://github.com/o/r", "--plugin"]
    monkeypatch.setattr("sys.argv", [*argv, str(tmp_path)])  # the folder exists
    assert (release.main(), commands) == (1, [])
