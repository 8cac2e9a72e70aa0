"""Sign artifacts in a registry, and attach SBOMs and provenance statements, by cosign.

All signatures are in cosign's format, by an ECDSA P-256 key. Nothing is sent to a transparency log, so that a
private registry and a cluster without internet access can use the same commands.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from tools.provenance import programs
from tools.provenance.distributions import image_locks
from tools.provenance.sbom import sbom, validate

SIGN_OPTIONS = ("--yes", "--tlog-upload=false")
VERIFY_OPTIONS = ("--insecure-ignore-tlog=true",)
"""Verify without a transparency log. The name warns of keyless signatures, which need the log."""
SBOM, PROVENANCE = "cyclonedx", "slsaprovenance1"
"""Names of types of attestations, as cosign knows them."""


@dataclass(frozen=True)
class Artifact:
    """An image or a chart in a registry."""

    repository: str
    digest: str
    """``sha256:…`` of its manifest."""

    @property
    def reference(self) -> str:
        """Reference that no push can change."""
        return f"{self.repository}@{self.digest}"


def check_key(key: str) -> None:
    """Check that a private key can be used. Raises `programs.ProgramError`.

    ``key`` is a file, ``env://VARIABLE`` or the URI of a key management service. The variable
    ``COSIGN_PASSWORD`` has the password of a file.
    """
    programs.run("cosign", "public-key", "--key", key)


def sign(artifact: Artifact, key: str) -> None:
    """Push a signature of the artifact. Raises `programs.ProgramError`."""
    programs.run("cosign", "sign", *SIGN_OPTIONS, "--key", key, artifact.reference)


def attest(artifact: Artifact, kind: str, predicate: str, key: str) -> None:
    """Push a signed statement about the artifact. It replaces an earlier one of this kind.

    ``kind`` is `SBOM` or `PROVENANCE`, ``predicate`` its JSON. Raises `programs.ProgramError`.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(predicate)
        file.flush()
        options = ["--replace", "--type", kind, "--predicate", file.name, "--key", key]
        programs.run("cosign", "attest", *SIGN_OPTIONS, *options, artifact.reference)


def image_sbom(name: str, artifact: Artifact) -> str:
    """Return the SBOM of an image in the registry. Raises `SbomError` or `programs.ProgramError`."""
    with tempfile.TemporaryDirectory() as scratch:
        files = Path(scratch) / "files.tar"
        programs.run("crane", "export", artifact.reference, files)
        document = sbom(name, artifact.digest, files, image_locks(name))
    validate(document)
    return document


def verify(artifact: Artifact, public_key: Path) -> None:
    """Raises `programs.ProgramError` if the artifact has no signature by this key."""
    programs.run("cosign", "verify", *VERIFY_OPTIONS, "--key", public_key, artifact.reference)


def statement(artifact: Artifact, kind: str, public_key: Path) -> str:
    """Return the verified statement about an artifact as a DSSE envelope, one line of JSON.

    Raises `programs.ProgramError` if it has none by this key.
    """
    options = ["--type", kind, "--key", str(public_key)]
    return programs.run("cosign", "verify-attestation", *VERIFY_OPTIONS, *options, artifact.reference)
