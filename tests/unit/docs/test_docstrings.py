"""The docstring check refuses first lines that are tails of sentences."""

import pytest

from tools import docstrings


@pytest.mark.parametrize(
    "line",
    [
        "Over all formats of the arena.",
        "Of the calling thread alone.",
        "By pod.",
        "Whose requests are blended.",
        "Which pods requests go to.",
        "What the build wrote.",
        "It tidies up at the end of its input.",
        "None: no disk tier, or unknown.",
        "the whole page.",
    ],
)
def test_refuses_tails_of_sentences(line: str) -> None:
    assert docstrings.problem(line) is not None


@pytest.mark.parametrize(
    "line",
    [
        "Bytes the arena can hold.",
        "Return the longest hit.",
        "Offset of the first block. Of no use without rows.",
        "Thread-safe queue.",
        "At most 16 slots.",
        "Without this rule, idle clients would block all others.",
        "``make check``: check everything.",
        "int32 ``[num_tokens]``: 1 if the token was retrieved.",
        "vLLM's name for host memory.",
        "kopf's access to the API server.",
        "",
    ],
)
def test_accepts_phrases_code_and_proper_names(line: str) -> None:
    assert docstrings.problem(line) is None


def test_checks_docstrings_of_modules_classes_functions_and_fields() -> None:
    text = (
        '"""What it is."""\nclass A:\n    """Of an arena."""\n    size = 1\n    """Of a slot."""\n\n'
        '    def f(self):\n        """By name."""\n        return "of no docstring"\n'
    )
    lines = list(docstrings.problems("lmcache/a.py", text))
    assert [line.split(" ")[0] for line in lines] == [f"lmcache/a.py:{n}" for n in (1, 3, 5, 8)]
    assert lines[1] == "lmcache/a.py:3 begins with 'Of': begin with a noun or a verb: Of an arena."


def test_checked_folders_pass() -> None:
    assert docstrings.all_problems() == []
