"""``.gpu/run.sh``: its environment, variables and messages. A stand-in takes the place of the checks."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu_bundle import __main__ as bundle
from tools.gpu_bundle import archive

CHECKS = """
import json, os, subprocess, sys
import from_the_bundle, from_the_machine, in_operator, in_sidecar
code = "import from_the_bundle, from_the_machine; print(from_the_bundle.WHERE)"
environ = os.environ | {"PYTHONPATH": "/nowhere"}
child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True)
print(json.dumps({
    "argv": sys.argv[1:], "cwd": os.getcwd(), "environ": dict(os.environ),
    "where": from_the_bundle.WHERE, "child": child.stdout.decode().strip(), "stderr": child.stderr.decode(),
}))
sys.exit(1)
"""
"""Prints what it sees, and ends with the status of a failed check."""
REDIS = '#!/bin/sh\n[ "$*" = --version ] && echo bundled\n'
TOOLS = ("sh", "cat", "date", "dirname", "id", "mkdir")
"""Programs that run.sh may use on any machine."""


class Machine:
    """A copied checkout with a bundle, and a Python whose packages are in PYTHONPATH."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tree, self.out = folder, folder / "a tree", folder / "out"
        self.bundle = self.tree / ".gpu"
        shutil.copytree(bundle.FILES, self.bundle)
        self.write("benchmarks/__init__.py")
        self.write("benchmarks/gpu/__init__.py")
        self.write("benchmarks/gpu/__main__.py", CHECKS)
        self.write("operator/in_operator.py")
        self.write("sidecar/in_sidecar.py")
        self.write(".gpu/python", f"{sys.version_info[0]}.{sys.version_info[1]}\n")
        self.write(".gpu/expected", "pytest\n")
        for name in ("from_the_machine", "from_the_bundle"):
            self.write(f"../machine/{name}.py", "WHERE = 'machine'")
        self.pack("packages", {"from_the_bundle.py": "WHERE = 'bundle'"})
        (folder / "bin").mkdir()
        for tool in TOOLS:
            (folder / "bin" / tool).symlink_to(str(shutil.which(tool)))

    def write(self, name: str, text: str = "") -> None:
        (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
        (self.tree / name).write_text(text)

    def pack(self, name: str, files: dict[str, str]) -> None:
        """Add an archive to the bundle."""
        source = self.folder / name
        source.mkdir()
        for file, text in files.items():
            (source / file).write_text(text)
            (source / file).chmod(0o755)
        archive.write(source, self.bundle / f"{name}.tar.xz")

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.folder / "bin"),
            "PYTHON": sys.executable,
            "PYTHONPATH": str(self.folder / "machine"),
            "OUT": str(self.out),
            "GPU_ENVIRONMENT": str(self.folder / "environment"),
        }
        argv = ["sh", str(self.bundle / "run.sh"), *arguments]
        return subprocess.run(argv, cwd="/", env=environment | variables, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def checks_of(done: subprocess.CompletedProcess[str]) -> dict:
    """Return what the checks saw."""
    assert done.returncode == 1, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_checks_run_with_packages_of_bundle_checkout_and_machine(machine):
    done = machine.run("vllm", "facts")
    checks = checks_of(done)
    assert checks["where"] == "bundle"
    assert checks["child"] == "bundle", checks["stderr"]
    assert checks["cwd"] == str(machine.tree)
    assert checks["argv"][:2] == ["--folder", str(machine.out)]
    assert checks["argv"][2] == "--seconds"
    assert 500 < int(checks["argv"][3]) <= 540
    assert checks["argv"][4:] == ["vllm", "facts"]


def test_second_run_reuses_the_environment_until_the_bundle_changes(machine):
    checks_of(machine.run())
    marker = machine.folder / "environment" / "marker"
    marker.touch()
    checks_of(machine.run())
    assert marker.exists()
    machine.pack("engine", {"vllm.py": ""})
    checks_of(machine.run())
    assert not marker.exists()
    assert list((machine.folder / "environment").glob("lib/python3.*/site-packages/vllm.py"))


def test_bundle_for_another_python_is_refused(machine):
    machine.write(".gpu/python", "3.9\n")
    done = machine.run()
    assert done.returncode == 1
    assert "the bundle is for 3.9" in done.stderr
    assert "make gpu-bundle TARGET_PYTHON=" in done.stderr


def test_packages_that_the_machine_lacks_are_reported(machine):
    machine.write(".gpu/expected", "not-installed-anywhere\n")
    done = machine.run()
    assert "lacks packages that the bundle does not contain: not-installed-anywhere." in done.stdout
    assert checks_of(done)


def test_redis_server_of_the_bundle_is_on_the_path(machine):
    machine.pack("redis", {"redis-server": REDIS})
    environ = checks_of(machine.run())["environ"]
    program = shutil.which("redis-server", path=environ["PATH"])
    assert program
    assert subprocess.check_output([program, "--version"], text=True) == "bundled\n"


@pytest.mark.parametrize("problem", ["does not run", "machine has its own"])
def test_redis_server_of_the_bundle_is_not_used(machine, problem):
    machine.pack("redis", {"redis-server": "#!/bin/sh\necho too old >&2; exit 1\n"})
    if problem == "machine has its own":
        local = machine.folder / "bin" / "redis-server"
        local.write_text("#!/bin/sh\n")
        local.chmod(0o755)
    done = machine.run()
    checks_of(done)
    assert ("does not run here: too old" in done.stderr) == (problem == "does not run")
    assert not os.path.lexists(machine.folder / "environment" / "bin" / "redis-server")
