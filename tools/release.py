"""Build and push a release: the images, and the chart that names them by digest.

    python -m tools.release --version 0.1.0 --registry ghcr.io/OWNER [--digests FILE]
                            [--plugin FOLDER --url https://github.com/OWNER/REPOSITORY]

This needs Docker with buildx, logged in to the registry. Each image gets an SBOM and its provenance as
attestations. FOLDER gets the archives of kubectl lmcache and their krew manifest, for the release page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools import plugin
from tools.kube import binaries

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "lmcache-operator"
IMAGES = ("operator", "router", "sidecar")
BUILDER = "lmcache-release"
"""A builder that runs in a container. Docker's default builder can't create attestations."""


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


def push_image(name: str, reference: str) -> str:
    """Build and push one image. Returns its digest."""
    with tempfile.NamedTemporaryFile() as metadata:
        run(
            "docker", "buildx", "build", "--builder", BUILDER, "--platform", "linux/amd64", "--push",
            "--pull", "--sbom=true", "--provenance=mode=max", "--metadata-file", metadata.name,
            "--file", ROOT / name / "Dockerfile", "--tag", reference, ROOT,
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
    return out / f"{CHART.name}-{version}.tgz"


def push_chart(archive: Path, registry: str) -> str:
    """Push the chart. Returns its digest, which helm prints."""
    argv = [str(binaries.path("helm")), "push", str(archive), f"oci://{registry}/charts"]
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


def release(version: str, registry: str, digests_file: Path | None) -> None:
    """Publish images and chart. Raises `ReleaseError`."""
    check_version(version)
    subprocess.run(["docker", "buildx", "rm", BUILDER], capture_output=True)
    run("docker", "buildx", "create", "--name", BUILDER, "--driver", "docker-container")
    digests = {name: push_image(name, f"{registry}/{name}:{version}") for name in IMAGES}
    with tempfile.TemporaryDirectory() as out:
        archive = pack_chart(version, registry, digests, Path(out))
        digests["chart"] = push_chart(archive, registry)
    if digests_file:
        with digests_file.open("a") as file:
            file.writelines(f"{name}={digest}\n" for name, digest in digests.items())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", required=True)
    parser.add_argument("--registry", required=True)
    parser.add_argument("--digests", type=Path, metavar="FILE", help="append NAME=DIGEST lines to this file")
    parser.add_argument(
        "--plugin", type=Path, metavar="FOLDER", help="must not exist (default: build no archives)"
    )
    parser.add_argument("--url", metavar="URL", help="address of the repository, without /releases")
    options = parser.parse_args()
    if options.plugin and not options.url:
        parser.error("--plugin needs --url, the address of the repository")
    try:
        if options.plugin:  # first: nothing is published if it fails
            check_version(options.version)
            build_plugin(options.version, options.url, options.plugin)
        release(options.version, options.registry, options.digests)
    except ReleaseError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
