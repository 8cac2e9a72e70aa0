"""A local registry with the images and the chart of this checkout, signed as a release signs them."""

import os
import subprocess
from pathlib import Path

import pytest

from testing.child_process import answers, free_ports, wait_until
from tools import release
from tools.images import build
from tools.provenance import programs, statement
from tools.provenance.distributions import IMAGES
from tools.provenance.evidence import Artifact

VERSION = "0.1.0"
BASE = "sha256:" + "b" * 64
"""Stands for the digest of the base image, which no registry can give here."""


@pytest.fixture(scope="session")
def registry():
    """Address of a registry in memory. It listens on the loopback interface, so clients use plain HTTP."""
    [port] = free_ports(1)
    address = f"127.0.0.1:{port}"
    argv = [programs.path("crane"), "registry", "serve", "--address", address]
    environment = {**os.environ, "PORT": str(port)}
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_until(lambda: answers(f"http://{address}/v2/"), timeout=30)
            yield address
        finally:
            server.kill()


@pytest.fixture(scope="session")
def keys(tmp_path_factory):
    """Folder with the key pairs ``cosign`` and ``other``."""
    folder = tmp_path_factory.mktemp("keys")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSIGN_PASSWORD", "correct horse")
        for name in ("cosign", "other"):
            subprocess.run(
                [programs.path("cosign"), "generate-key-pair", f"--output-key-prefix={name}"],
                cwd=folder, check=True, capture_output=True,
            )  # fmt: skip
        yield folder


@pytest.fixture(scope="session")
def published(registry, keys, tmp_path_factory) -> tuple[dict[str, Artifact], dict[str, str]]:
    """All artifacts of a release, and the SBOMs of its images. buildah stands in for BuildKit."""
    source = statement.source()
    artifacts, sboms = {}, {}
    for name in IMAGES:
        repository = f"{registry}/{name}"
        programs.run("crane", "push", build(name).archive, f"{repository}:{VERSION}")
        artifacts[name] = Artifact(
            repository, programs.run("crane", "digest", f"{repository}:{VERSION}").strip()
        )
    digests = {name: artifact.digest for name, artifact in artifacts.items()}
    out: Path = tmp_path_factory.mktemp("chart")
    archive = release.pack_chart(VERSION, registry, digests, out)
    artifacts["chart"] = Artifact(
        f"{registry}/charts/lmcache-operator", release.push_chart(archive, registry, "--plain-http")
    )
    for name, artifact in artifacts.items():
        document = release.attach(name, artifact, VERSION, source, BASE, str(keys / "cosign.key"))
        sboms |= {name: document} if document else {}
    return artifacts, sboms
