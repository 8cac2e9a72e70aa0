"""The steps of ``make gpu-check``: their order, time limits and packages, and what a failure means."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    name: str
    seconds: int
    """Time limit. All limits together are less than ten minutes."""
    what: str
    meaning: str
    """Meaning of a failure for the user."""
    packages: tuple[tuple[str, str], ...] = ()
    """Modules that the step needs, each with the name of its distribution."""

    def missing(self) -> list[str]:
        """Return the distributions that are not installed."""
        return missing(self.packages)


def missing(packages: tuple[tuple[str, str], ...]) -> list[str]:
    """Return the distributions of the modules that are not installed."""
    return [name for module, name in packages if not _is_installed(module)]


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that contains it
        return False


_SIDECAR = (
    ("grpc", "grpcio"),
    ("google.protobuf", "protobuf"),
    ("redis", "redis"),
    ("cryptography", "cryptography"),
    ("xxhash", "xxhash"),
    ("prometheus_client", "prometheus-client"),
    ("yaml", "PyYAML"),
)
_MODEL = (("torch", "torch"), ("transformers", "transformers"), ("safetensors", "safetensors"))
_TESTS = (("pytest", "pytest"), ("pytest_timeout", "pytest-timeout"), ("xdist", "pytest-xdist"))

STEPS = (
    Step(
        "facts",
        40,
        "driver, GPU, and how processes share GPU memory",
        "the sidecar can't read this GPU's memory: engines copy by themselves (--transfer SharedMemory)",
    ),
    Step(
        "tests",
        110,
        "tests of the CUDA code on the real driver",
        "copies of KV may fail or be wrong on this GPU: don't use the cache on it, and send us the page",
        (*_TESTS, *_MODEL, *_SIDECAR),
    ),
    Step(
        "bench",
        45,
        "speed of copies, and their effect on kernels",
        "speed on this GPU is unknown",
    ),
    Step(
        "vllm",
        260,
        "a real vLLM with an 8B model of random weights, beside a real sidecar",
        "vLLM with the cache does not work right on this GPU: don't use it there, and send us the page",
        (("vllm", "vllm"), *_MODEL, *_SIDECAR),
    ),
    Step(
        "library",
        40,
        "the library with an 8B model of transformers",
        "the library's cache does not work as it should on this GPU; the sidecar is not affected",
        _MODEL,
    ),
    Step(
        "blend",
        20,
        "blending of documents on the GPU",
        "blending does not work as it should on this GPU; the sidecar is not affected",
        _MODEL,
    ),
    Step(
        "arena",
        45,
        "an arena of up to 64 GiB: time to populate and to pin it, and what kernels feel meanwhile",
        "the start of a large arena may disturb the engine",
    ),
)
"""In order of value: if time runs out, the last steps are missing."""
