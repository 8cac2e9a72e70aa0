"""The simulated CUDA driver (``tools/cudasim``) for child processes: its build, orders and counters."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
import unittest
from collections.abc import Iterator, Sequence
from pathlib import Path

from tools.cache import cache_root

SOURCES = Path(__file__).parent.parent / "tools" / "cudasim"
_REAL_GPU = os.environ.get("LMCACHE_TEST_GPU")
GPU = _REAL_GPU or "GPU-11111111-1111-1111-1111-111111111111"
"""The first device of a node: simulated, or the real GPU in ``LMCACHE_TEST_GPU``."""
OTHER_GPU = "GPU-22222222-2222-2222-2222-222222222222"
MIG_SLICE = "MIG-33333333-3333-3333-3333-333333333333"
_FLAGS = "-std=gnu11 -O2 -g -Wall -Wextra -pthread -shared -fPIC -fvisibility=hidden -Wl,-soname,libcuda.so.1"
_ENTRY = struct.Struct("24sq")


@functools.cache
def build() -> Path:
    """Build ``libcuda.so.1``. Returns its folder. Raises FileNotFoundError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("the simulated CUDA driver is C, and there is no compiler here: install gcc")
    files = sorted(SOURCES.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    folder = cache_root() / f"cudasim-{digest}"
    if not (folder / "libcuda.so.1").exists():
        folder.mkdir(parents=True, exist_ok=True)
        new_file = folder / f"libcuda.{os.getpid()}"
        sources = [str(file) for file in files if file.suffix == ".c"]
        subprocess.run([compiler, *_FLAGS.split(), "-o", str(new_file), *sources, "-ldl"], check=True)
        new_file.rename(folder / "libcuda.so.1")
    return folder


def load_driver() -> None:
    """Load the simulated driver if this process is on a node.

    In a copy of a fork server, the linker has read LD_LIBRARY_PATH when that server started.
    """
    if "CUDASIM_NODE" in os.environ:
        ctypes.CDLL(str(build() / "libcuda.so.1"))


class Node:
    """The simulated GPUs of one node. State shared by its processes is in ``path``."""

    def __init__(self, path: Path, devices: Sequence[str] = (GPU,)) -> None:
        self.path, self.devices = path, devices
        path.mkdir(parents=True, exist_ok=True)

    def environment(self, role: str = "any", **settings: object) -> dict[str, str]:
        """Environment variables that put a child process on this node. ``settings`` are ``orders="stall"``,
        ``memory=2**30``, ``driver_version=12040`` and so on; see docs/reference/simulated-driver.md.
        """
        settings_env = {f"CUDASIM_{name.upper()}": str(value) for name, value in settings.items()}
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(
                filter(None, [str(build()), os.environ.get("LD_LIBRARY_PATH")])
            ),
            "CUDASIM_NODE": str(self.path),
            "CUDASIM_DEVICES": ",".join(self.devices),
            "CUDASIM_ROLE": role,
            **settings_env,
        }

    def order(self, text: str) -> None:
        """Give orders to all processes from now on. They replace earlier orders, and "" cancels all."""
        new_file = self.path / f"orders.{os.getpid()}"
        new_file.write_text(text)
        new_file.rename(self.path / "orders")

    def processes(self, role: str | None = None) -> list[dict[str, int]]:
        """Counters of each live process that has loaded the driver."""
        counters = []
        for record in self.path.glob(f"process-{role or '*'}-*"):
            with contextlib.suppress(FileNotFoundError), record.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:  # a live process holds the lock
                    counters.append({n.rstrip(b"\0").decode(): v for n, v in _ENTRY.iter_unpack(file.read())})
        return counters

    def num_copies(self, role: str | None = None) -> int:
        """Number of calls that copied KV, over all live processes of a role: batches, and single copies."""
        return self.count("batches", role) + self.count("single_copies", role)

    def count(self, counter: str, role: str | None = None) -> int:
        """Sum of a counter over all live processes of a role."""
        return sum(process[counter] for process in self.processes(role))


class RealNode(Node):
    """This host with its real driver. Tests that ask for more than a real driver can do are skipped here."""

    def __init__(self, path: Path, devices: Sequence[str] = (GPU,)) -> None:
        super().__init__(path, devices)
        if list(devices) != [GPU]:
            raise unittest.SkipTest("only one real GPU is tested")

    def environment(self, role: str = "any", **settings: object) -> dict[str, str]:
        if settings:
            raise unittest.SkipTest(f"a real driver has no setting {', '.join(settings)}")
        return {"CUDA_VISIBLE_DEVICES": GPU}

    def order(self, text: str) -> None:
        raise unittest.SkipTest("a real driver takes no orders")

    def processes(self, role: str | None = None) -> list[dict[str, int]]:
        raise unittest.SkipTest("a real driver has no counters")


@contextlib.contextmanager
def node(devices: Sequence[str] = (GPU,)) -> Iterator[Node]:
    """A temporary node. If ``LMCACHE_TEST_GPU`` names a GPU, the node is this host."""
    if _REAL_GPU:
        with tempfile.TemporaryDirectory() as folder:
            yield RealNode(Path(folder), devices)
        return
    with tempfile.TemporaryDirectory(prefix="cudasim-", dir="/dev/shm") as folder:
        yield Node(Path(folder), devices)
