"""Build cosign, which signs, and crane, which reads and writes registries, with Go and the module proxy.

Go compares each module with the public checksum database, so that a version always means the same source.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from tools.cache import cached_directory
from tools.kube import binaries

PACKAGES = {
    "cosign": "github.com/sigstore/cosign/v2/cmd/cosign@v2.6.5",
    "crane": "github.com/google/go-containerregistry/cmd/crane@v0.22.1",
}
"""Go package and version of each program."""


class ProgramError(RuntimeError):
    """A program can't be built, or it failed. The message has its output."""


def path(name: str) -> Path:
    """Return the path of one program. Builds it if the cache lacks it. Raises `ProgramError`."""
    package = PACKAGES[name]
    digest = hashlib.sha256(repr((package, binaries.ARCH)).encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        print(
            f"[release] building {package} (once; cosign takes 5 min of processor time)",
            file=sys.stderr,
            flush=True,
        )
        argv = [
            binaries.go_command(),
            "install",
            "-buildvcs=false",
            "-trimpath",
            f"-gcflags={binaries.GCFLAGS}",
        ]
        env = {**os.environ, "CGO_ENABLED": "0", "GOBIN": str(folder)}
        done = subprocess.run([*argv, "-ldflags=-s -w", package], env=env, capture_output=True, text=True)
        if done.returncode:
            tail = "\n".join(done.stderr.splitlines()[-15:])
            raise ProgramError(f"building {package} failed (is the Go module proxy reachable?):\n{tail}")

    return cached_directory(f"{name}-{digest}", make) / name


def run(name: str, *arguments: str | Path, environment: dict[str, str] | None = None) -> str:
    """Run a program. Returns its standard output. Raises `ProgramError` with its output."""
    argv = [str(path(name)), *map(str, arguments)]
    env = {**os.environ, **(environment or {})}
    done = subprocess.run(argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise ProgramError(f"failed: {name} {' '.join(argv[1:])}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout
