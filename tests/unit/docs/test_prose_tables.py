"""The prose check covers headings, table cells, list items and generated pages."""

import pytest

from tools import prose


@pytest.mark.parametrize(
    "text",
    [
        "| state | meaning |\n|---|---|\n| off | The engine is told to wait. |\n",
        "- Rows are stored.\n- The engine is told to wait.\n",
        "## Engines are told\n",
        "1. Nested:\n    - The engine is told to wait.\n",
    ],
)
def test_reports_clipped_words_in_headings_tables_and_lists(text: str) -> None:
    (problem,) = prose.problems("docs/a.md", text)
    assert "'told' (reported, sent)" in problem


def test_skips_code_in_tables_and_tables_in_code() -> None:
    assert list(prose.problems("docs/a.md", "| a |\n|---|\n| `told` |\n")) == []
    assert list(prose.problems("docs/a.md", "```\n| told |\n```\n")) == []


def test_returns_cells_without_separators_and_splits_them_only_at_bare_pipes() -> None:
    assert list(prose.headings_and_cells("# H\n| a | b\\|c |\n|---|:-:|\n| | d |\n")) == [
        "H",
        "a",
        "b\\|c",
        "d",
    ]


def test_ignores_the_length_of_sentences_in_tables() -> None:
    assert list(prose.problems("docs/a.md", f"| a |\n|---|\n| {'word ' * 60} |\n")) == []


def test_accepts_the_value_none() -> None:
    assert list(prose.problems("docs/a.md", "If K is None, or there is none, it is computed.")) == []
    assert len(list(prose.problems("docs/a.md", "A size that is none is refused."))) == 1


def test_covers_generated_pages() -> None:
    assert {"docs/reference/api.md", "docs/reference/resource.md"} <= set(prose.tracked())
