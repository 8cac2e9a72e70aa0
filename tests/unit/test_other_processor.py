"""``make test-avx2`` shows torch and vLLM a processor without AVX-512, on any machine."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from testing.engine.process import _python_path

FOLDER = Path(__file__).resolve().parents[2] / "testing" / "avx2"
_ASK = """
import torch
print(torch.backends.cpu.get_cpu_capability())
for feature in ("avx512", "avx512_bf16", "vnni", "amx_tile"):
    ask = getattr(torch.cpu, f"_is_{feature}_supported")
    print(ask.__module__, ask())
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="AVX2 is of x86")
def test_torch_is_told_that_there_is_no_avx512(monkeypatch):
    """Also where there is none: the answers are the replaced ones."""
    monkeypatch.setenv("LMCACHE_TEST_CPU", str(FOLDER))
    env = {**os.environ, "PYTHONPATH": _python_path("."), "ATEN_CPU_CAPABILITY": "avx2"}
    told = subprocess.run(
        [sys.executable, "-c", _ASK], env=env, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    assert told == ["AVX2", *["sitecustomize False"] * 4, ""]
