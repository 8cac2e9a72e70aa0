"""The decision records in docs/adr have consecutive numbers and the same headings."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("*.md"))
HEADINGS = ["Context", "Decision", "Consequences", "Alternatives"]


def test_record_numbers_are_consecutive() -> None:
    numbers = [int(path.name[:4]) for path in RECORDS]
    assert numbers == list(range(1, len(RECORDS) + 1))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name[:4])
def test_record_has_number_status_and_usual_headings(path: Path) -> None:
    text = path.read_text()
    title = re.match(r"# (\d+)\. \S.*\n\nStatus: \w+", text)
    assert title is not None
    assert int(title[1]) == int(path.name[:4])
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
