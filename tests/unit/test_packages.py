"""Pinned packages in folders of the cache directory: installed once, in a folder for each set of pins."""

import shutil
import sys

import pytest

from testing import packages

INSTALLER = """#!{python}
import pathlib, sys
arguments = sys.argv[1:]
pins = pathlib.Path(arguments[arguments.index("--requirement") + 1]).read_text()
if "broken" in pins:
    sys.exit("no such package")
pathlib.Path(arguments[arguments.index("--target") + 1], "installed").write_text(pins)
"""


@pytest.fixture
def install(monkeypatch, tmp_path):
    """Install pins by a program in place of uv. Returns the folder and the messages."""
    program, requirements = tmp_path / "uv", tmp_path / "pins.txt"
    program.write_text(INSTALLER.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(packages, "uv", lambda: program)
    monkeypatch.setenv("LMCACHE_CACHE_DIR", str(tmp_path / "cache"))

    def run(pins: str):
        requirements.write_text(pins)
        said: list[str] = []
        return packages.installed("tool", requirements, "a tool (1 MB)", "Try again.", said.append), said

    return run


def test_installs_each_set_of_pins_once(install):
    first, said = install("a==1")
    assert (said, (first / "installed").read_text()) == (["installing a tool (1 MB)"], "a==1")
    assert install("a==1") == (first, [])
    other, _ = install("a==2")
    assert other != first
    assert (first / "installed").read_text() == "a==1"
    shutil.rmtree(first)
    assert install("a==1") == (first, ["installing a tool (1 MB)"])


def test_failed_installation_names_the_remedy_and_leaves_no_folder(install, tmp_path):
    with pytest.raises(packages.InstallationError, match=r"Try again\.\nno such package"):
        install("broken==1")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
