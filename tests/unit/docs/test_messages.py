"""The message check covers CRDs and the strings of the product that read as prose."""

from tools import messages


def test_refuses_sentences_of_more_than_25_words_and_clipped_words() -> None:
    sentence = "word " * 24
    assert list(messages.problems("a", f"A {sentence.strip()}. Next {sentence.strip()}.")) == []
    (problem,) = messages.problems("a", f"A long {sentence.strip()}.")
    assert problem.startswith("a: 26 words, the limit is 25: A long word")
    assert list(messages.problems("a", f"A long {sentence.strip()}.", is_limited=False)) == []
    (problem,) = messages.problems("a", "the sidecar is told to wait")
    assert "'told' (reported, sent)" in problem


def test_finds_descriptions_and_rules_at_any_depth_of_a_crd() -> None:
    rule = {"rule": "self > 0", "message": "must be positive"}
    schema = {
        "properties": {
            "description": {"type": "string", "description": "A field of this name."},
            "size": {"items": [{"description": "Bytes.", "x-kubernetes-validations": [rule]}]},
        }
    }
    assert list(messages.crd_texts(schema)) == ["A field of this name.", "Bytes.", "must be positive"]


def test_finds_prose_in_code_but_no_docstrings_keys_or_scripts() -> None:
    text = (
        'def f(pod, a):\n    """Return a long text for people."""\n'
        '    g("one of our keys" "joined here", "a short key")\n'
        '    h(f"pod {pod} is {a:.1f} s late: {len(a)} more", "test -f a || echo $(cat b) > c")\n'
    )
    assert list(messages.code_texts(text)) == [
        (3, "one of our keysjoined here"),
        (4, "pod VALUE is VALUE s late: VALUE more"),
    ]


def test_crds_and_the_product_pass() -> None:
    assert messages.all_problems() == []
