"""The prose checker finds long sentences and clipped words, and ignores code and tables."""

import pytest

from tools import prose

LONG = "The sidecar " + "very " * 40 + "long."


def test_sentences_exclude_code_tables_and_headings() -> None:
    text = (
        "# Title\n\n```sh\nmake test\n```\n\n| a | b |\n|---|---|\n| c | d |\n\nOne sentence. Another one.\n"
    )
    assert list(prose.sentences(text)) == ["One sentence.", "Another one."]


def test_list_item_ends_a_sentence_and_links_count_as_text() -> None:
    text = "Run these:\n- `make demo`, then\n  look\n- [the guide](docs/guide.md#anchor)\n"
    assert list(prose.sentences(text)) == ["Run these:", "CODE, then look", "the guide"]
    assert prose.num_words("CODE, then look") == 3


def test_abbreviations_and_versions_do_not_end_a_sentence() -> None:
    assert len(list(prose.sentences("Use a cache, e.g. Redis 7.2 or Valkey. Restart it."))) == 2


@pytest.mark.parametrize(("name", "limit"), [("README.md", 28), ("docs/adr/0001-x.md", 32)])
def test_page_with_too_many_long_sentences_is_reported(name: str, limit: int) -> None:
    assert list(prose.problems(name, "Short one. Another short one.")) == []
    (problem,) = prose.problems(name, " ".join([LONG, LONG]))
    assert problem == f"{name}: one sentence in ten has 43 words or more, the limit is {limit}"
    assert prose.num_words(LONG) == 43


def test_clipped_word_is_reported_with_a_replacement() -> None:
    (problem,) = prose.problems("README.md", "The operator is told of it.")
    assert "'told' (reported, sent)" in problem


def test_handwritten_files_pass() -> None:
    assert prose.all_problems() == []
