"""SGLang's packages, in a folder of the cache directory, and the environment variables of its processes.

The folder has only the packages of ``tools/requirements/sglang.txt``. All other packages that SGLang imports
come from the project's environment, where vLLM needs them, too. SGLang's own pins (CUDA kernels, and torch
for CUDA) are not installed. What replaces them is in ``testing/sglang/cpu``.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from pathlib import Path

from testing.child_process import REPOSITORY, SOURCES
from testing.packages import installed, run
from tools.cache import exclusive

REQUIREMENTS = REPOSITORY / "tools" / "requirements" / "sglang.txt"
CPU = Path(__file__).parent / "cpu"
"""Folder with the stand-ins for CUDA."""
_HASH_MODULE = "hicache_hash_cpp"
"""The C++ module with which HiCache hashes pages. SGLang compiles it when it is first used (6 s)."""
_COMPILE = "from sglang.srt.mem_cache.utils import get_hash_str; get_hash_str([1])"


def version() -> str:
    """Return the version of SGLang that the project is tested with."""
    match = re.search(r"^sglang==(\S+)", REQUIREMENTS.read_text(), re.MULTILINE)
    assert match is not None, f"{REQUIREMENTS} does not pin sglang"
    return match[1]


@functools.cache
def package() -> Path:
    """Return the folder to put first in ``PYTHONPATH``. Installs SGLang if it is missing (half a minute).

    Raises InstallationError.
    """
    announcement = f"SGLang {version()} (150 MB, about 30 s)"
    problem = "SGLang cannot be installed. Check the access to the package index."
    return installed(f"sglang-{version()}", REQUIREMENTS, announcement, problem, _say)


def prepare() -> None:
    """Install SGLang, and compile its C++ module, if they are missing. Raises InstallationError."""
    folder = extensions()
    with exclusive(folder.with_name(f"{folder.name}.lock"), _say):
        if (folder / _HASH_MODULE / f"{_HASH_MODULE}.so").exists():
            return
        _say("compiling the C++ module with which SGLang hashes pages (10-20 s)")
        run(
            [sys.executable, "-W", "ignore", "-c", _COMPILE],
            "SGLang cannot compile a C++ module. Install a C++ compiler and the headers of OpenSSL and "
            "Python. On Debian: apt-get install g++ libssl-dev python3-dev",
            env={**os.environ, **variables()},
        )


def variables() -> dict[str, str]:
    """Return the environment variables of SGLang's processes. Child processes inherit them."""
    return {
        "PYTHONPATH": os.pathsep.join(map(str, (CPU, package(), SOURCES))),
        "TORCH_EXTENSIONS_DIR": str(extensions()),
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first prompt of a process compiles for seconds
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        # By default, /health computes a token and then sleeps for a second.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # One thread: on tiny models, a team of threads stalls when one of its cores is busy.
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONHASHSEED": "0",
    }


def extensions() -> Path:
    """Return the folder of compiled C++ modules. A compiler names the sources' folder in them."""
    return package().with_name(f"{package().name}-extensions")


def _say(text: str) -> None:
    print(f"[sglang] {text}", file=sys.stderr, flush=True)
