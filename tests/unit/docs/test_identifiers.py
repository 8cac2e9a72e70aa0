"""The identifier check refuses clipped words in names."""

import pytest

from tools import identifiers


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("told", "told"), ("num_seen", "seen"), ("KeptRows", "kept"), ("_unless_gone", "gone"),
        ("OWN_TOKENS", "own"), ("make_it", "it"), ("can_let_go", "let_go"), ("one", "one"), ("at", "at"),
        ("_most", "most"), ("Found", "found"),
    ],
)  # fmt: skip
def test_refuses_clipped_words(name: str, word: str) -> None:
    assert (identifiers.problem(name) or "").startswith(f"{word!r} (")


@pytest.mark.parametrize(
    "name",
    ["num_found", "asked_at", "at_most", "one_of", "go_offline", "owner", "item", "unit", "stay_up", "_"],
)
def test_accepts_words_with_a_noun_and_words_of_the_field(name: str) -> None:
    assert identifiers.problem(name) is None


def test_splits_names_at_underscores_and_capital_letters() -> None:
    assert identifiers.words("_NUM_rows") == ["num", "rows"]
    assert identifiers.words("CudaIPCReader2") == ["cuda", "ipcreader2"]


def test_allows_words_of_sentences_in_names_of_tests_only() -> None:
    assert identifiers.problem("test_tenant_evicts_its_own_rows_before_others") is None
    assert identifiers.problem("evicts_its_own_rows") is not None
    assert identifiers.problem("test_waits_for_a_worker_until_it_is_dead") is None
    assert identifiers.problem("test_it_waits_for_a_worker") is not None
    assert identifiers.problem("test_worker_is_told") is not None


def test_allows_a_listed_name_in_its_folder_only() -> None:
    assert identifiers.problem("_last_seen", "operator") is None
    assert identifiers.problem("_last_seen", "sidecar") is not None


def test_checks_functions_classes_arguments_attributes_variables_imports_and_modules() -> None:
    text = (
        "import numpy as gone\nclass Told: ...\ndef tell(seen, *, kept=1, **own):\n    it: int = 1\n"
        "    self.others = [brought for brought in ()]\n    used(beside, self.nobody)\n"
    )
    lines = list(identifiers.problems("lmcache/news.py", text))
    names = {line.split(" ")[1].rstrip(":") for line in lines}
    assert names == {"gone", "Told", "tell", "seen", "kept", "own", "it", "others", "brought", "news"}
    assert lines[0] == "lmcache/news.py:0 news: 'news' (change, update)"


def test_checked_folders_pass() -> None:
    assert identifiers.all_problems() == []
