"""``make test-avx2`` presents a processor without AVX-512 to torch and vLLM, on any machine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from testing.child_process import SOURCES
from testing.engine.process import _python_path
from tests.harness.light import needs

FOLDER = Path(__file__).resolve().parents[2] / "testing" / "avx2"
_FEATURE_PROGRAM = """
import torch
print(torch.backends.cpu.get_cpu_capability())
for feature in ("avx512", "avx512_bf16", "vnni", "amx_tile"):
    query = getattr(torch.cpu, f"_is_{feature}_supported")
    print(query.__module__, query())
"""


@needs("torch")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 exists only on x86")
def test_torch_sees_no_avx512(monkeypatch):
    """The answers are the replaced ones even on machines without AVX-512."""
    monkeypatch.setenv("LMCACHE_TEST_CPU", str(FOLDER))
    env = {**os.environ, "PYTHONPATH": _python_path(SOURCES), "ATEN_CPU_CAPABILITY": "avx2"}
    output = subprocess.run(
        [sys.executable, "-c", _FEATURE_PROGRAM], env=env, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert output == ["AVX2", *["sitecustomize False"] * 4, ""]
