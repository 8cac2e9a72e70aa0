"""The table of ARCHITECTURE.md names modules and folders that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
TABLE = TEXT[TEXT.index("## Where to find what") : TEXT.index("## Rules that hold everywhere")]
FOLDERS = [
    "benchmarks",
    "lmcache",
    "operator",
    "sidecar",
    "testing",
    "tests",
    "tools",
    "charts",
    "docs",
    "crds",
]
FILES = {
    f"/{path.relative_to(ROOT).with_suffix('') if suffix else path.relative_to(ROOT)}"
    for folder in FOLDERS
    for path in [ROOT / folder, *(ROOT / folder).rglob("*")]
    for suffix in (True, False)
}


def names_in_table() -> list[str]:
    rows = [line.split("|")[2] for line in TABLE.splitlines() if line.startswith("| ")]
    return [name for row in rows[1:] for name in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("name", sorted(set(names_in_table())))
def test_names_in_the_table_are_modules_or_folders(name: str) -> None:
    path = "/" + name.removeprefix("../").strip("/")
    assert any(file.endswith(path) for file in FILES)
