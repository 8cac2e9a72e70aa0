"""Signatures and statements of a release, verified by cosign and, without it, by openssl."""

import base64
import json
import subprocess

import pytest

from tools import release
from tools.provenance import evidence, programs, statement
from tools.provenance.distributions import IMAGES, image_locks
from tools.provenance.evidence import Artifact

NAMES = [*IMAGES, "chart"]


@pytest.mark.parametrize("name", NAMES)
def test_signature_is_valid(published, keys, name):
    evidence.verify(published[0][name], keys / "cosign.pub")


def test_other_key_is_refused(published, keys):
    with pytest.raises(programs.ProgramError, match="no matching signatures"):
        evidence.verify(published[0]["operator"], keys / "other.pub")
    with pytest.raises(programs.ProgramError, match="no matching attestations"):
        evidence.statement(published[0]["operator"], evidence.PROVENANCE, keys / "other.pub")


@pytest.fixture(scope="module")
def forged(published, registry, tmp_path_factory) -> Artifact:
    """The operator's image with one more file, under the same name."""
    folder = tmp_path_factory.mktemp("forged")
    (folder / "file").write_text("changed")
    layer = folder / "layer.tar"
    subprocess.run(["tar", "--create", f"--file={layer}", "--directory", folder, "file"], check=True)
    original = published[0]["operator"]
    programs.run(
        "crane", "append", "--base", original.reference, "-f", layer, "-t", f"{registry}/operator:forged"
    )
    digest = programs.run("crane", "digest", f"{registry}/operator:forged").strip()
    return Artifact(original.repository, digest)


def test_changed_image_is_refused(forged, keys):
    with pytest.raises(programs.ProgramError, match="no signatures found"):
        evidence.verify(forged, keys / "cosign.pub")


def test_signature_of_another_image_is_refused(published, forged, keys):
    """An attacker who can write to the registry gives a signature another name."""
    original = published[0]["operator"]
    tags = [f"{entry.repository}:{entry.digest.replace(':', '-')}.sig" for entry in (original, forged)]
    programs.run("crane", "copy", *tags)
    with pytest.raises(programs.ProgramError, match="invalid or missing digest"):
        evidence.verify(forged, keys / "cosign.pub")


def verify_with_openssl(keys, signature: str, signed: bytes, folder) -> str:
    (folder / "signature").write_bytes(base64.b64decode(signature))
    (folder / "signed").write_bytes(signed)
    argv = ["openssl", "dgst", "-sha256", "-verify", keys / "cosign.pub", "-signature", folder / "signature"]
    return subprocess.run([*argv, folder / "signed"], capture_output=True, text=True).stdout.strip()


def test_openssl_verifies_signature_and_digest(published, keys, tmp_path):
    artifact = published[0]["operator"]
    tag = f"{artifact.repository}:{artifact.digest.replace(':', '-')}.sig"
    [layer] = json.loads(programs.run("crane", "manifest", tag))["layers"]
    payload = programs.run("crane", "blob", f"{artifact.repository}@{layer['digest']}")
    signature = layer["annotations"]["dev.cosignproject.cosign/signature"]
    assert verify_with_openssl(keys, signature, payload.encode(), tmp_path) == "Verified OK"
    assert json.loads(payload)["critical"]["image"]["docker-manifest-digest"] == artifact.digest
    changed = payload.replace("sha256:", "sha256;")
    assert verify_with_openssl(keys, signature, changed.encode(), tmp_path) == "Verification failure"


def statements(published, keys, name: str, kind: str) -> list[dict]:
    """All verified statements of one kind."""
    lines = evidence.statement(published[0][name], kind, keys / "cosign.pub").splitlines()
    return [json.loads(base64.b64decode(json.loads(line)["payload"])) for line in lines]


def test_openssl_verifies_the_statement(published, keys, tmp_path):
    envelope = json.loads(
        evidence.statement(published[0]["chart"], evidence.PROVENANCE, keys / "cosign.pub").splitlines()[0]
    )
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"].encode()
    signed = b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)
    assert verify_with_openssl(keys, envelope["signatures"][0]["sig"], signed, tmp_path) == "Verified OK"


@pytest.mark.parametrize("name", NAMES)
def test_provenance_names_artifact_and_commit(published, keys, name):
    [document] = statements(published, keys, name, evidence.PROVENANCE)
    assert document["predicateType"] == "https://slsa.dev/provenance/v1"
    digest = published[0][name].digest.removeprefix("sha256:")
    assert [subject["digest"] for subject in document["subject"]] == [{"sha256": digest}]
    build = document["predicate"]["buildDefinition"]
    commit = {"gitCommit": statement.source().commit}
    assert commit in [entry["digest"] for entry in build["resolvedDependencies"]]
    assert build["externalParameters"]["artifact"] == name


@pytest.mark.parametrize("name", IMAGES)
def test_sbom_has_the_packages_of_the_image(published, keys, name):
    [document] = statements(published, keys, name, evidence.SBOM)
    assert document["predicate"]["bomFormat"] == "CycloneDX"
    components = document["predicate"]["components"]
    purls = {entry["purl"] for entry in components}
    assert purls >= {f"pkg:pypi/{lock.name}@{lock.version}" for lock in image_locks(name).values()}
    assert any(purl.startswith("pkg:deb/debian/libc6@") for purl in purls)
    assert not any(purl.startswith("pkg:deb/debian/apt@") for purl in purls)
    python = [entry for entry in components if entry["purl"].startswith("pkg:pypi/")]
    assert [entry["name"] for entry in python if "licenses" not in entry] == []
    debian = [entry for entry in components if entry["purl"].startswith("pkg:deb/")]
    without_licence = [entry["name"] for entry in debian if "licenses" not in entry]
    assert len(without_licence) < len(debian) / 10, without_licence


def test_repeated_release_replaces_statements(published, keys):
    """Someone who verifies sees one statement of each kind."""
    artifact = published[0]["operator"]
    args = ("operator", artifact, "0.1.0", statement.source(), "sha256:" + "c" * 64, str(keys / "cosign.key"))
    assert release.attach(*args) == published[1]["operator"]
    [document] = statements(published, keys, "operator", evidence.PROVENANCE)
    assert "c" * 64 in json.dumps(document)
    assert len(statements(published, keys, "operator", evidence.SBOM)) == 1


def test_wrong_password_is_an_error_before_anything_is_published(keys, monkeypatch):
    monkeypatch.setenv("COSIGN_PASSWORD", "wrong")
    with pytest.raises(programs.ProgramError, match="decrypt"):
        evidence.check_key(str(keys / "cosign.key"))
    with pytest.raises(programs.ProgramError, match=r"missing\.key"):
        evidence.check_key(str(keys / "missing.key"))
