"""The client in engines: connectors of vLLM and SGLang, their common core, the wire and the CUDA driver.

``vllm`` and ``sglang`` are the connectors, on the engine-neutral ``core``. ``rpc`` is the wire to the
sidecar, and ``cuda`` calls the CUDA driver. The sidecar uses the wire's messages and the driver, too.
``group`` launches the parts of an engine over several pods, and ends them together.
``blend`` is the arithmetic of CacheBlend, which the library uses, too.
"""

import sys
from pathlib import Path

# In an engine's container this package is a folder on PYTHONPATH, and its dependencies are in a folder next
# to it (tools/payload.py). That folder goes last, so that it hides none of the engine's own packages.
_bundled = Path(__file__).parent.parent / "lmcache_bundled" / f"cp{sys.version_info[0]}{sys.version_info[1]}"
if _bundled.is_dir() and str(_bundled) not in sys.path:
    sys.path.append(str(_bundled))
