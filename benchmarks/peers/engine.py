"""Runs the engine's child (testing/engine/child.py, its path comes first) with the peer's connector in it."""

from __future__ import annotations

import runpy
import sys

from llvmlite.binding import ffi

# vLLM asks every attribute of every module for its __dict__; llvmlite's library answers with a C function.
ffi.lib._fntab["__dict__"] = {}

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
