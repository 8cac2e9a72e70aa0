"""Build and push a release: the images, and the chart that names them by digest.

    python -m tools.release --version 0.1.0 --registry ghcr.io/OWNER [--digests FILE]
                            [--key cosign.key] [--sboms FOLDER]
                            [--plugin FOLDER --url https://github.com/OWNER/REPOSITORY]

This needs Docker with buildx, logged in to the registry. With a key, images and chart get signatures in
cosign's format, and statements about their SBOM and provenance. The folder of --plugin gets the archives of
kubectl lmcache and their krew manifest, for the release page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tools import plugin
from tools.kube import binaries
from tools.provenance import evidence, programs, statement
from tools.provenance.distributions import IMAGES
from tools.provenance.evidence import Artifact
from tools.provenance.sbom import SbomError

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "lmcache-operator"
BUILD_PINS = ROOT / "tools" / "requirements" / "build.txt"
BASE = "docker.io/library/debian:bookworm-slim"
"""Base of all images. A release resolves it to a digest once, so that all images have the same base."""
BUILDER = "lmcache-release"
"""A builder that runs in a container. Docker's default builder can't set the times of files in layers."""


class ReleaseError(RuntimeError):
    """The release is incomplete. The message says what to do."""


def run(*argv: str | Path) -> None:
    """Run a command. Raises `ReleaseError` with the command."""
    if subprocess.run([str(a) for a in argv], cwd=ROOT).returncode:
        raise ReleaseError(f"failed: {' '.join(str(a) for a in argv)}")


def check_version(version: str) -> None:
    """Check the versions of chart and library. Raises `ReleaseError` if one is different."""
    texts = {
        CHART / "Chart.yaml": f"\nappVersion: {version}\n",
        ROOT / "pyproject.toml": f'\nversion = "{version}"\n',
    }
    for path, line in texts.items():
        if line not in path.read_text():
            raise ReleaseError(f"{path.relative_to(ROOT)} is not of version {version}: change it, or the tag")


def push_image(name: str, reference: str, base: str, epoch: int) -> str:
    """Build and push one image. Returns its digest.

    BuildKit's attestations have times, and would become part of the digest. The statements of `attach` do not
    change the digest. ``base``: digest of `BASE`. ``epoch``: time of all files, in seconds.
    """
    pinned_base = f"{BASE.removeprefix('docker.io/library/')}=docker-image://{BASE.partition(':')[0]}@{base}"
    with tempfile.NamedTemporaryFile() as metadata:
        run(
            "docker", "buildx", "build", "--builder", BUILDER, "--platform", "linux/amd64",
            "--output", "type=registry,rewrite-timestamp=true", "--build-arg", f"SOURCE_DATE_EPOCH={epoch}",
            "--sbom=false", "--provenance=false", "--build-context", pinned_base,
            "--metadata-file", metadata.name, "--file", ROOT / name / "Dockerfile", "--tag", reference, ROOT,
        )  # fmt: skip
        digest = json.loads(Path(metadata.name).read_text())["containerimage.digest"]
    assert isinstance(digest, str)
    return digest


def replace_once(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        raise ReleaseError(
            f"values.yaml has {old!r} {text.count(old)} times, not once: adapt tools/release.py"
        )
    return text.replace(old, new)


def pack_chart(version: str, registry: str, digests: dict[str, str], out: Path) -> Path:
    """Create the chart's archive in ``out``, with the images of this release in its values."""
    chart = out / CHART.name
    shutil.copytree(CHART, chart)
    values = chart / "values.yaml"
    text = replace_once(
        values.read_text(),
        "repository: ghcr.io/lmcache-cluster/operator\n",
        f"repository: {registry}/operator\n",
    )
    text = replace_once(text, '  digest: ""\n', f"  digest: {digests['operator']}\n")
    for name in ("sidecar", "router"):
        image = f"{registry}/{name}:{version}@{digests[name]}"
        text = replace_once(text, f'  {name}Image: ""\n', f"  {name}Image: {image}\n")
    values.write_text(text)
    run(binaries.path("helm"), "package", chart, "--version", version, "--destination", out)
    archive = out / f"{CHART.name}-{version}.tgz"
    repack(archive)
    return archive


def repack(archive: Path) -> None:
    """Write a chart's archive again, so that it depends on nothing but the files."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        plugin.pack(archive, {"": Path(scratch)})


def push_chart(archive: Path, registry: str, *options: str) -> str:
    """Push the chart, with further options of helm. Returns its digest, which helm prints."""
    argv = [str(binaries.path("helm")), "push", str(archive), f"oci://{registry}/charts", *options]
    done = subprocess.run(argv, capture_output=True, text=True)
    output = done.stdout + done.stderr
    digest = re.search(r"^Digest: (sha256:[0-9a-f]{64})$", output, re.MULTILINE)
    if done.returncode or not digest:
        raise ReleaseError(f"failed: {' '.join(argv)}\n{output}")
    return digest[1]


def build_plugin(version: str, url: str, folder: Path) -> None:
    """Build the archives of kubectl lmcache and their manifest. Raises `ReleaseError`."""
    try:
        plugin.build(folder, version, f"{url}/releases/download/v{version}")
    except (FileExistsError, FileNotFoundError, subprocess.CalledProcessError) as error:
        raise ReleaseError(f"the archives of kubectl lmcache: {error}") from error


def attach(
    name: str, artifact: Artifact, version: str, source: statement.Source, base: str, key: str | None
) -> str | None:
    """Sign an artifact and attach its statements. Without a key, only create the SBOM.

    Returns the SBOM; None for the chart, which has no packages. Raises `SbomError` or `ProgramError`.
    """
    is_image = name in IMAGES
    document = evidence.image_sbom(name, artifact) if is_image else None
    if key:
        files = [ROOT / name / "Dockerfile", ROOT / name / "requirements.txt", BUILD_PINS] if is_image else []
        predicate = statement.provenance(name, version, source, files, (BASE, base) if is_image else None)
        evidence.sign(artifact, key)
        evidence.attest(artifact, evidence.PROVENANCE, predicate, key)
        if document:
            evidence.attest(artifact, evidence.SBOM, document, key)
    return document


def release(
    version: str,
    registry: str,
    digests_file: Path | None,
    key: str | None = None,
    sboms: Path | None = None,
) -> None:
    """Publish images and chart. Raises `ReleaseError`, `SourceError`, `SbomError` or `ProgramError`."""
    check_version(version)
    source = statement.source()
    if key:  # first: nothing is published if it fails
        statement.check_clean()
        evidence.check_key(key)
    base = programs.run("crane", "digest", BASE).strip()
    subprocess.run(["docker", "buildx", "rm", BUILDER], capture_output=True)
    run("docker", "buildx", "create", "--name", BUILDER, "--driver", "docker-container")
    digests = {name: push_image(name, f"{registry}/{name}:{version}", base, source.epoch) for name in IMAGES}
    documents = {
        name: attach(name, Artifact(f"{registry}/{name}", digests[name]), version, source, base, key)
        for name in IMAGES
    }
    with tempfile.TemporaryDirectory() as out:
        archive = pack_chart(version, registry, digests, Path(out))
        digests["chart"] = push_chart(archive, registry)
    chart = Artifact(f"{registry}/charts/{CHART.name}", digests["chart"])
    attach("chart", chart, version, source, base, key)
    if sboms:
        sboms.mkdir(parents=True, exist_ok=True)
        for name, document in documents.items():
            (sboms / f"{name}.cdx.json").write_text(document or "")
    if digests_file:
        with digests_file.open("a") as file:
            file.writelines(f"{name}={digest}\n" for name, digest in digests.items())
    if not key:
        print("Images and chart are not signed. To sign them, set KEY to a private key of cosign.")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--digests", type=Path, metavar="FILE", help="append NAME=DIGEST lines to this file")
    parser.add_argument("--key", help="private key: a file, env://VARIABLE or a URI (default: sign nothing)")
    parser.add_argument("--sboms", type=Path, metavar="FOLDER", help="write the images' SBOMs there")
    parser.add_argument(
        "--plugin", type=Path, metavar="FOLDER", help="must not exist (default: build no archives)"
    )
    parser.add_argument("--url", metavar="URL", help="address of the repository, without /releases")
    options = parser.parse_args()
    if options.key == "":
        parser.error("--key is empty: name a key, or omit the option to sign nothing")
    if options.plugin and not options.url:
        parser.error("--plugin needs --url, the address of the repository")
    try:
        if options.plugin:  # first: nothing is published if it fails
            check_version(options.version)
            build_plugin(options.version, options.url, options.plugin)
        release(options.version, options.registry, options.digests, options.key, options.sboms)
    except (ReleaseError, statement.SourceError, SbomError, programs.ProgramError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
