"""The table of ARCHITECTURE.md names folders that exist, and each package."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
TABLE = TEXT[TEXT.index("## Where to find what") : TEXT.index("## Rules that hold everywhere")]
ROWS = [line.split("|")[1].strip(" `/") for line in TABLE.splitlines() if line.startswith("| `")]
PACKAGES = [
    str(file.parent.relative_to(ROOT))
    for folder in ("lmcache", "operator", "sidecar")
    for file in [*(ROOT / folder).glob("__init__.py"), *(ROOT / folder).glob("lmcache_*/__init__.py")]
]


@pytest.mark.parametrize("folder", ROWS)
def test_rows_of_the_table_are_folders(folder: str) -> None:
    assert (ROOT / folder).is_dir()


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_has_a_row(package: str) -> None:
    assert any(f"{row}/".startswith(f"{package}/") for row in ROWS)
