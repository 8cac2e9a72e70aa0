"""Two builds of an image from equal files have one digest."""

import json

import pytest

from tests.harness.checkouts import copy
from tools.images import IMAGES, build
from tools.images.build import bud, buildah, exclusive_store

CONTEXT = [
    *(".dockerignore", "pyproject.toml", "README.md", "LICENSE"),
    *("operator", "router", "sidecar", "tools"),
]


def manifest(layout) -> dict:
    """The manifest in a folder of the OCI image layout."""
    [entry] = json.loads((layout / "index.json").read_text())["manifests"]
    algorithm, _, digest = entry["digest"].partition(":")
    return {"digest": digest, **json.loads((layout / "blobs" / algorithm / digest).read_text())}


@pytest.mark.timeout(2700)  # three builds; on two busy cores, those of the operator took more than 900 s
@pytest.mark.parametrize("name", ["operator", "router", "sidecar"])
def test_second_build_has_the_same_digest(name, tmp_path):
    build(name)  # creates the base image
    manifests = []
    for folder, umask, seconds in (("a", 0o022, 1_000_000_000), ("another", 0o077, 1_700_000_000)):
        (tmp_path / folder).mkdir()
        context = copy(tmp_path / folder, umask, seconds, CONTEXT)
        tag = f"localhost/reproduced-{name}:{folder}"
        with exclusive_store():
            bud(IMAGES[name], context, tag, "--no-cache")
            buildah("push", "--quiet", tag, f"oci:{tmp_path / folder}-image")
            buildah("rmi", tag)
        manifests.append(manifest(tmp_path / f"{folder}-image"))
    assert manifests[0] == manifests[1]
