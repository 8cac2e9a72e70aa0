"""The checks of docstrings, names, pages and messages: what they refuse, and what they accept."""

import pytest

from tools import docstrings, identifiers, messages, prose

LONG = "The sidecar " + "very " * 40 + "long."


@pytest.mark.parametrize(
    ("line", "is_accepted"),
    [
        ("Over all formats of the arena.", False),
        ("Whose requests are blended.", False),
        ("What the build wrote.", False),
        ("It tidies up at the end of its input.", False),
        ("None: no disk tier, or unknown.", False),
        ("the whole page.", False),
        ("Return the longest hit.", True),
        ("Offset of the first block. Of no use without rows.", True),
        ("At most 16 slots.", True),
        ("``make check``: check everything.", True),
        ("vLLM's name for host memory.", True),
        ("", True),
    ],
)
def test_docstrings_begin_with_no_tail_of_a_sentence(line: str, is_accepted: bool) -> None:
    assert (docstrings.problem(line) is None) == is_accepted


def test_docstrings_of_modules_classes_functions_and_fields_are_checked() -> None:
    text = (
        '"""What it is."""\nclass A:\n    """Of an arena."""\n    size = 1\n    """Of a slot."""\n\n'
        '    def f(self):\n        """By name."""\n        return "of no docstring"\n'
    )
    lines = list(docstrings.problems("lmcache/a.py", text))
    assert [line.split(" ")[0] for line in lines] == [f"lmcache/a.py:{n}" for n in (1, 3, 5, 8)]
    assert lines[1] == "lmcache/a.py:3 begins with 'Of': begin with a noun or a verb: Of an arena."


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("num_seen", "seen"), ("KeptRows", "kept"), ("OWN_TOKENS", "own"), ("make_it", "it"),
        ("can_let_go", "let_go"), ("at", "at"), ("bare", "bare"), ("_most", "most"),
        ("test_worker_is_told", "told"), ("test_it_waits_for_a_worker", "it"), ("evicts_its_own_rows", "own"),
    ],
)  # fmt: skip
def test_names_contain_no_clipped_words(name: str, word: str) -> None:
    assert (identifiers.problem(name) or "").startswith(f"{word!r} (")


def test_all_kinds_of_names_are_checked() -> None:
    text = (
        "import numpy as gone\nclass Told: ...\ndef tell(seen, *, kept=1, **own):\n    it: int = 1\n"
        "    self.others = [brought for brought in ()]\n    used(beside, self.nobody)\n"
    )
    lines = list(identifiers.problems("lmcache/news.py", text))
    names = {line.split(" ")[1].rstrip(":") for line in lines}
    assert names == {"gone", "Told", "tell", "seen", "kept", "own", "it", "others", "brought", "news"}
    assert (identifiers.problem("_last_seen", "operator"), lines[0]) == (
        None,
        "lmcache/news.py:0 news: 'news' (change, update)",
    )


def test_two_public_types_of_one_name_are_refused() -> None:
    allowed = "class _Job: ...\nKey = TypeVar('Key')\nROW = 2\n"
    texts = {
        "sidecar/a.py": allowed + "class Row:\n    class Part: ...\nPlace = tuple[int, int]\n",
        "operator/b.py": allowed + "class Part: ...\nclass Key: ...\nRow: TypeAlias = 'int'\n",
        "lmcache/c.py": "Place = int | str\nRow = Any\n",
    }
    assert list(identifiers.repeated_types(texts)) == [
        "operator/b.py:6 Row: sidecar/a.py:4 has a type of this name: say which idea it is",
        "lmcache/c.py:2 Row: sidecar/a.py:4 has a type of this name: say which idea it is",
        "lmcache/c.py:1 Place: sidecar/a.py:6 has a type of this name: say which idea it is",
    ]


def test_sentences_of_a_page_exclude_code_tables_and_headings() -> None:
    text = (
        "# Title\n\n```sh\nmake test\n```\n\n| a | b |\n|---|---|\n| c | d |\n\nIt uses Redis 7.2. Two.\n"
        "- `make demo`, then\n  look\n- [the guide](docs/guide.md#anchor)\n"
    )
    assert list(prose.sentences(text)) == ["It uses Redis 7.2.", "Two.", "CODE, then look", "the guide"]
    cells = prose.headings_and_cells("# H\n| a | b\\|c |\n|---|:-:|\n| | d |\n")
    assert list(cells) == ["H", "a", "b\\|c", "d"]


@pytest.mark.parametrize(("name", "limit"), [("README.md", 28), ("docs/adr/0001-x.md", 32)])
def test_page_with_too_many_long_sentences_is_reported(name: str, limit: int) -> None:
    assert list(prose.problems(name, "Short one. Another short one.")) == []
    assert list(prose.problems(name, f"| a |\n|---|\n| {LONG} |\n")) == [], "a table has no sentences"
    (problem,) = prose.problems(name, " ".join([LONG, LONG]))
    assert problem == f"{name}: one sentence in ten has 43 words or more, the limit is {limit}"


@pytest.mark.parametrize(
    "text",
    [
        "The operator is told of it.",
        "| state | meaning |\n|---|---|\n| off | The engine is told to wait. |\n",
        "- Rows are stored.\n- The engine is told to wait.\n",
        "## Engines are told\n",
        "1. Nested:\n    - The engine is told to wait.\n",
    ],
)
def test_clipped_words_of_a_page_are_reported_with_a_replacement(text: str) -> None:
    (problem,) = prose.problems("docs/a.md", text)
    assert "'told' (reported, sent)" in problem


def test_messages_have_at_most_25_words_and_no_clipped_word() -> None:
    sentence = "word " * 24
    assert list(messages.problems("a", f"A {sentence.strip()}. Next {sentence.strip()}.")) == []
    (problem,) = messages.problems("a", f"A long {sentence.strip()}.")
    assert problem.startswith("a: 26 words, the limit is 25: A long word")
    (problem,) = messages.problems("a", "the sidecar is told to wait")
    assert "'told' (reported, sent)" in problem


def test_messages_are_those_of_crds_and_the_prose_in_code() -> None:
    rule = {"rule": "self > 0", "message": "must be positive"}
    schema = {
        "properties": {
            "description": {"type": "string", "description": "A field of this name."},
            "size": {"items": [{"description": "Bytes.", "x-kubernetes-validations": [rule]}]},
        }
    }
    assert list(messages.crd_texts(schema)) == ["A field of this name.", "Bytes.", "must be positive"]
    text = (
        'def f(pod, a):\n    """Return a long text for people."""\n'
        '    g("one of our keys" "joined here", "a short key")\n'
        '    h(f"pod {pod} is {a:.1f} s late: {len(a)} more", "test -f a || echo $(cat b) > c")\n'
    )
    assert list(messages.code_texts(text)) == [
        (3, "one of our keysjoined here"),
        (4, "pod VALUE is VALUE s late: VALUE more"),
    ]
