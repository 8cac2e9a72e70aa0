"""The ``redis-server`` of this machine, with its shared libraries, for machines without one."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

ON_EVERY_MACHINE = frozenset((
    "ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2",
    "librt.so.1", "libgcc_s.so.1", "libstdc++.so.6",
))  # fmt: skip
"""Libraries of libc, in a version that fits the machine's loader, and two that torch needs, too."""
_LAUNCHER = """\
#!/bin/sh
# Run redis-server with the libraries in this folder. A link to this file works, too.
here=$(dirname "$(readlink -f "$0")")
LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} exec "$here/program/redis-server" "$@"
"""


def libraries(ldd: str) -> list[Path]:
    """Return the libraries in the output of ``ldd`` that the GPU machine may lack."""
    paths = [Path(path) for path in re.findall(r"=> (/\S+)", ldd)]
    return [path for path in paths if path.name not in ON_EVERY_MACHINE]


def pack(folder: Path) -> bool:
    """Copy ``redis-server``, its libraries and a launcher into a folder. Returns False without one."""
    program = shutil.which("redis-server")
    if program is None:
        return False
    ldd = subprocess.run(["ldd", program], capture_output=True, text=True, check=True)
    for name in ("lib", "program"):
        (folder / name).mkdir(parents=True)
    # The program's own name chooses what it does, so the copy has the name of the link.
    shutil.copy(program, folder / "program" / "redis-server")
    for library in libraries(ldd.stdout):
        shutil.copy(library, folder / "lib" / library.name)
    launcher = folder / "redis-server"
    launcher.write_text(_LAUNCHER)
    launcher.chmod(0o755)
    return True
