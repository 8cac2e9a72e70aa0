"""What a release ships, run as a pod runs it: as its own user, with nothing to write to."""

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
    """A root file system made of an image."""

    def __init__(self, name: str):
        self.name, self.archive = name, build(name).archive
        self.container = buildah("from", f"docker-archive:{self.archive}").splitlines()[-1]
        self.root = Path(buildah("mount", self.container))
        self.config = json.loads(buildah("inspect", self.container))["OCIv1"]["config"]

    def run(self, *argv: str) -> str:
        """Output of a command as the image's user on a read-only root. Raises with what it printed."""
        words = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(self.root), self.config["User"], *argv]
        # HOME as a container runtime sets it for a user that /etc/passwd does not have.
        environment = {"HOME": "/", **dict(entry.split("=", 1) for entry in self.config["Env"])}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    def close(self):
        buildah("umount", self.container)
        buildah("rm", self.container)


@pytest.fixture(scope="module", params=["operator", "sidecar"])
def container(request):
    made = Container(request.param)
    yield made
    made.close()


def test_it_is_no_larger_than_it_may_be(container):
    assert container.archive.stat().st_size <= IMAGES[container.name].max_bytes


def test_it_runs_as_its_own_user(container):
    assert container.config["User"] == USERS[container.name]
    assert container.run("id", "-u").strip() == USERS[container.name].partition(":")[0]


def test_its_command_answers_on_a_read_only_root(container):
    [command] = container.config["Entrypoint"]
    assert container.run(command, "--version").split()[0] == f"lmcache-{container.name}"
    assert "usage:" in container.run(command, "--help")


def test_nothing_that_is_imported_was_left_out(container):
    container.run(PYTHON, "-c", IMPORT_ALL, f"lmcache_{container.name}")


def test_bytecode_is_there_for_what_is_imported(container):
    root = container.root / "opt/lmcache"
    sources = [*root.glob("venv/lib/*/site-packages/*/*.py"), *root.glob("project/lmcache*/**/*.py")]
    missing = [path for path in sources if not list(path.parent.glob(f"__pycache__/{path.stem}.*.pyc"))]
    assert sources
    assert missing == []


def test_the_sidecar_hands_out_the_library_with_bundles_for_all_pythons():
    made = Container("sidecar")
    try:
        payload = made.root / "opt/lmcache/payload"
        assert (payload / "lmcache" / "__init__.py").exists()
        assert {path.name for path in (payload / "lmcache_bundled").iterdir()} == {
            "cp310", "cp311", "cp312", "cp313",
        }  # fmt: skip
        code = "import sys; sys.path.insert(0, '/opt/lmcache/payload'); import lmcache, grpc, google.protobuf"
        made.run("/usr/bin/python3", "-c", code)
    finally:
        made.close()
