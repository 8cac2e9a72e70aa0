"""ARCHITECTURE.md has a row for each package, and the docstring of each package names its folders."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
TABLE = TEXT[TEXT.index("## The packages") : TEXT.index("## Rules that hold everywhere")]
FOLDERS = sorted(
    file.parent
    for folder in ("lmcache", "operator", "sidecar")
    for file in (ROOT / folder).rglob("__init__.py")
)
PACKAGES = [folder for folder in FOLDERS if folder.parent not in FOLDERS]


def relative(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_each_package_has_a_row(package: Path) -> None:
    assert f"| [`{package.name}`]({relative(package)}/__init__.py) |" in TABLE


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_docstrings_of_packages_name_their_folders(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    children = [child.name for child in FOLDERS if child.parent == folder]
    assert [name for name in children if f"``{name}``" not in docstring] == []
