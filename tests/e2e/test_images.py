"""Released images run as pods run them: as their own users, on a read-only root."""

import json
import subprocess
from pathlib import Path

import pytest

from tools.images import IMAGES, build
from tools.images.build import buildah

USERS = {"operator": "65532:65532", "sidecar": "2000:2000"}
PYTHON = "/opt/lmcache/venv/bin/python"
IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""
READ_ONLY = """
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" &&
user=$1 && shift && exec chroot --userspec=$user "$0" "$@"
"""


class Container:
    """The root file system of an image."""

    def __init__(self, name: str):
        self.name, self.archive = name, build(name).archive
        self.container = buildah("from", f"docker-archive:{self.archive}").splitlines()[-1]
        self.root = Path(buildah("mount", self.container))
        self.config = json.loads(buildah("inspect", self.container))["OCIv1"]["config"]

    def run(self, *argv: str) -> str:
        """Run a command as the image's user on a read-only root. Returns or raises with its output."""
        words = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(self.root), self.config["User"], *argv]
        # A container runtime sets this HOME for a user that /etc/passwd lacks.
        environment = {"HOME": "/", **dict(entry.split("=", 1) for entry in self.config["Env"])}
        completed = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert not completed.returncode, completed.stdout + completed.stderr
        return completed.stdout

    def close(self):
        buildah("umount", self.container)
        buildah("rm", self.container)


@pytest.fixture(scope="module", params=["operator", "sidecar"])
def container(request):
    image = Container(request.param)
    yield image
    image.close()


def test_image_is_within_its_size_limit(container):
    assert container.archive.stat().st_size <= IMAGES[container.name].max_bytes


def test_image_runs_as_its_own_user(container):
    assert container.config["User"] == USERS[container.name]
    assert container.run("id", "-u").strip() == USERS[container.name].partition(":")[0]


def test_command_answers_on_a_read_only_root(container):
    [command] = container.config["Entrypoint"]
    name = f"lmcache-{container.name}"  # as in `kubectl exec`
    assert container.run(name, "--version").split()[0] == name
    assert "usage:" in container.run(command, "--help")


def test_all_modules_can_be_imported(container):
    container.run(PYTHON, "-c", IMPORT_ALL, f"lmcache_{container.name}")


def test_all_modules_have_bytecode(container):
    root = container.root / "opt/lmcache"
    sources = [*root.glob("venv/lib/*/site-packages/*/*.py"), *root.glob("project/lmcache*/**/*.py")]
    missing = [path for path in sources if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))]
    assert sources
    assert missing == []


def test_sidecar_payload_has_bundles_for_all_supported_pythons():
    image = Container("sidecar")
    try:
        payload = image.root / "opt/lmcache/payload"
        assert (payload / "lmcache_client" / "__init__.py").exists()
        assert {path.name for path in (payload / "lmcache_bundled").iterdir()} == {
            "cp310", "cp311", "cp312", "cp313",
        }  # fmt: skip
        code = "import sys; sys.path.insert(0, '/opt/lmcache/payload'); "
        code += "import lmcache_client, grpc, google.protobuf"
        image.run("/usr/bin/python3", "-c", code)
    finally:
        image.close()


@pytest.fixture(scope="module")
def router():
    image = Container("router")
    yield image
    image.close()


def test_router_starts_as_its_own_user_on_a_read_only_root(router):
    assert router.archive.stat().st_size <= IMAGES["router"].max_bytes
    assert router.config["User"] == "65532:65532"
    help_text = router.run(*router.config["Entrypoint"], "--help")
    assert "kv_aware" in help_text
    assert "--service-discovery" in help_text
