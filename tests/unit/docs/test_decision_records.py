"""The decision records in docs/adr have consecutive numbers and the same headings."""

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "adr"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
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


def test_index_lists_records_that_no_longer_stand() -> None:
    statuses = {path.name: path.read_text().split("\nStatus: ", 1)[1].lower() for path in RECORDS}
    former = [name for name, status in statuses.items() if status.startswith(("superseded", "withdrawn"))]
    index, _, _ = (FOLDER / "README.md").read_text().partition("These records stand")
    assert re.findall(r"^\| \[\d+\.[^]]*\]\(([\w.-]+)\)", index, re.MULTILINE) == former
