"""Run the engine's child program with the peer's connector. The first argument is the program's path."""

from __future__ import annotations

import runpy
import sys

from llvmlite.binding import ffi

# vLLM reads the __dict__ of every attribute of every module. llvmlite's library would return a C function.
ffi.lib._fntab["__dict__"] = {}

if __name__ == "__main__":
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
