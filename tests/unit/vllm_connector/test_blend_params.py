"""Parameters of requests about documents, right or wrong."""

import pytest

from lmcache_client.vllm.blend.params import MAX_DOCUMENTS, BlendParams, ParamsError, is_document, read_blend
from lmcache_client.vllm.blend.separator import Separator

SETTINGS = "attended", 0.15, Separator()
TWO_TOKENS = Separator((0, 1))


def read(blend, num_tokens=100):
    return read_blend({"lmcache": {"blend": blend}}, range(num_tokens), *SETTINGS)


def read_separated(tokens, separator=TWO_TOKENS, **blend):
    params = {"lmcache": {"blend": {"separator": True, **blend}}}
    return read_blend(params, tokens, "attended", 0.15, separator)


@pytest.mark.parametrize(
    ("blend", "documents"),
    [
        ({"documents": [30, 20]}, (range(30), range(30, 50))),
        ({"documents": [30, 20], "start": 5}, (range(5, 35), range(35, 55))),
        ({"documents": [30, 0, 20]}, (range(30), range(30, 50))),
        ({"documents": [99]}, (range(99),)),
        ({"starts": [5, 35, 55]}, (range(5, 35), range(35, 55))),
        ({"starts": [0, 0, 99]}, (range(99),)),
    ],
)
def test_documents_are_read_from_lengths_or_positions(blend, documents):
    assert read(blend) == BlendParams(documents, "attended", 0.15)


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        "lmcache",
        {},
        {"lmcache": None},
        {"lmcache": [1]},
        *({"lmcache": {"blend": blend}} for blend in (None, False, {"documents": []}, {"documents": [0]})),
        *({"lmcache": {"blend": {"starts": starts}}} for starts in ([], [4], [4, 4])),
        {"lmcache": {"blended": {"tokens": 5}, "namespace": "00", "num_tokens": 5}},
    ],
)
def test_nothing_is_blended_without_documents(params):
    assert read_blend(params, range(100), *SETTINGS) is None


@pytest.mark.parametrize("blend", [True, {}, {"selection": "attended", "ratio": 0.15}])
def test_documents_that_are_not_named_are_to_be_found(blend):
    assert read(blend) == BlendParams((), "attended", 0.15, is_detected=True)


def test_documents_to_find_have_the_selection_and_ratio_of_the_request():
    assert read({"selection": "first", "ratio": 0}) == BlendParams((), "first", 0.0, is_detected=True)


@pytest.mark.parametrize(
    "params",
    [
        None,
        {},
        {"do_remote_decode": True},
        {"lmcache": {"blend": None}},
        {"lmcache": 5},
        {"lmcache": {"document": False, "namespace": "00", "num_tokens": 5}},
    ],
)
def test_auto_finds_documents_of_requests_that_say_nothing(params):
    assert read_blend(params, range(100), *SETTINGS, is_auto=True) == read(True)


@pytest.mark.parametrize(
    "section", [{"blend": False}, {"document": True}, {"blend": False, "document": True}]
)
def test_auto_finds_no_documents_in_documents_and_where_the_request_forbids_it(section):
    assert read_blend({"lmcache": section}, range(100), *SETTINGS, is_auto=True) is None


def test_auto_does_not_change_what_requests_say():
    params = {"lmcache": {"blend": {"documents": [30]}, "document": True}}
    assert read_blend(params, range(100), *SETTINGS, is_auto=True) == read({"documents": [30]})
    with pytest.raises(ParamsError, match="document must be true or false, not 1"):
        read_blend({"lmcache": {"document": 1}}, range(100), *SETTINGS, is_auto=True)


@pytest.mark.parametrize(
    ("tokens", "documents"),
    [
        ([5, 0, 1, 6, 7, 0, 1, 8, 0, 1, 9], (range(3, 5), range(7, 8))),
        ([0, 1, 6, 0, 1, 9], (range(2, 3),)),
        ([5, 0, 1, 0, 1, 6, 0, 1, 0, 1, 9], (range(5, 6),)),  # parts without tokens are no documents
        ([0, 0, 1, 1, 0, 0, 1, 9], (range(3, 5),)),
    ],
)
def test_documents_are_the_parts_between_separators(tokens, documents):
    assert read_separated(tokens) == BlendParams(documents, "attended", 0.15)
    assert read_separated(tokens, ratio=1, selection="first") == BlendParams(documents, "first", 1.0)


@pytest.mark.parametrize("tokens", [[], [0], [5, 6], [0, 1], [5, 0, 1, 6], [5, 0, 1, 0, 1], [1, 0, 0]])
def test_prompt_with_fewer_than_two_separators_is_exact(tokens):
    assert read_separated(tokens) is None


def test_separators_do_not_overlap():
    """The first of two places that overlap is the separator, as in ``str.split``."""
    assert read_separated([7, 7, 7, 5, 7, 7, 9], Separator((7, 7))).documents == (range(2, 4),)
    assert read_separated([7, 0, 7, 0, 7, 5, 7, 0, 7, 9], Separator((7, 0, 7))).documents == (range(3, 6),)


def test_prompt_has_at_most_256_separated_documents():
    largest = [0, 1, *[5, 0, 1] * MAX_DOCUMENTS, 9]
    assert len(read_separated(largest).documents) == MAX_DOCUMENTS
    assert len(read_separated([0, 1] * 3 * MAX_DOCUMENTS + largest[2:]).documents) == MAX_DOCUMENTS
    with pytest.raises(ParamsError, match="separator must mark at most 256 documents, not 257"):
        read_separated([0, 1, 5, *largest])


@pytest.mark.parametrize("separator", [(0, 1), (0, 1, 0)])
def test_prompt_of_thousands_of_separators_is_refused(separator):
    with pytest.raises(ParamsError, match="separator must occur at most 1024 times in a prompt"):
        read_separated([0, 1] * 30_000 + [9], Separator(separator))


def test_question_follows_the_last_separator():
    with pytest.raises(ParamsError, match="separator ends the prompt: at least one token of a question"):
        read_separated([5, 0, 1, 6, 0, 1])


def test_selection_and_ratio_of_the_request_replace_the_settings():
    params = read({"documents": [30], "selection": "deviation", "ratio": 1})
    assert params == BlendParams((range(30),), "deviation", 1.0)
    assert params.salt("tenant", "x") == "tenant\0blend x\0deviation\0001.0"
    assert params.salt(None, "x") == params.salt("", "x") != params.salt("tenant", "x")
    assert params.salt("", "x") != params.salt("", "y")
    whole, real = (read({"documents": [30], "ratio": ratio}) for ratio in (0, 0.0))
    assert whole.salt("", "x") == real.salt("", "x")


@pytest.mark.parametrize(
    ("blend", "field", "message"),
    [
        (1, "blend", "must be true, false or an object with documents, starts or separator, not 1"),
        ("true", "blend", "must be true, false or an object with documents, starts or separator, not 'true'"),
        (
            [[[30]]],
            "blend",
            "must be true, false or an object with documents, starts or separator, not a value",
        ),
        ({"start": 5}, "blend", "must have one of documents, starts or separator"),
        ({"separator": False}, "blend", "must have one of documents, starts or separator"),
        ({"documents": [30], "starts": [0, 30]}, "blend", "must have one of documents, starts or separator"),
        ({"separator": "###"}, "separator", "must be true or false, not '###'"),
        ({"separator": None}, "separator", "must be true or false, not None"),
        ({"separator": True, "start": 5}, "separator", "must be left out if there are start"),
        (
            {"separator": True, "documents": [30], "starts": [0]},
            "separator",
            "must be left out if there are documents and starts",
        ),
        ({"separator": True}, "separator", "needs lmcache.blend_separator: set it in the engine, or name"),
        ({"documents": [30], "seperator": 1, "Ratio": 2}, "blend", "has unknown keys: 'Ratio', 'seperator'"),
        ({"documents": 30}, "documents", "must be a list of numbers of tokens, not 30"),
        ({"documents": [True]}, "documents", "must have numbers from 0 to 100, not True"),
        ({"documents": [30.0]}, "documents", "must have numbers from 0 to 100, not 30.0"),
        ({"documents": [-1]}, "documents", "must have numbers from 0 to 100, not -1"),
        ({"documents": [10**5000]}, "documents", "must have numbers from 0 to 100, not a value of type int"),
        (
            {"documents": ["3" * 999]},
            "documents",
            f"must have numbers from 0 to 100, not {'3' * 100!r}",
        ),
        ({"documents": [60, 40]}, "documents", "end at token 100 of 100: at least one token of a question"),
        ({"documents": [100, 100]}, "documents", "end at token 200 of 100"),
        ({"documents": [30], "start": True}, "start", "must have numbers from 0 to 100, not True"),
        ({"starts": [0, 100]}, "starts", "end at token 100 of 100"),
        ({"starts": [30, 20]}, "starts", "must be in ascending order"),
        ({"starts": [0, 20], "start": 3}, "start", "must be left out if there are starts"),
        ({"documents": [0] * (MAX_DOCUMENTS + 1)}, "documents", "must have at most 256 documents, not 257"),
        ({"selection": "best"}, "selection", "must be one of attended, deviation, first"),
        ({"ratio": 15}, "ratio", "must be a number from 0 to 1, not 15"),
        ({"documents": [30], "selection": "best"}, "selection", "must be one of attended, deviation, first"),
        ({"documents": [30], "selection": ["attended"]}, "selection", "not a value of type list"),
        ({"documents": [30], "ratio": True}, "ratio", "must be a number from 0 to 1, not True"),
        ({"documents": [30], "ratio": 1.1}, "ratio", "must be a number from 0 to 1, not 1.1"),
        ({"documents": [30], "ratio": float("nan")}, "ratio", "must be a number from 0 to 1, not nan"),
        ({"documents": [30], "ratio": "0.15"}, "ratio", "must be a number from 0 to 1, not '0.15'"),
    ],
)
def test_malformed_parameters_are_refused_with_the_field_and_the_reason(blend, field, message):
    with pytest.raises(ParamsError) as caught:
        read(blend)
    assert caught.value.field == field
    assert str(caught.value).startswith(field)
    assert message in str(caught.value)


def test_deeply_nested_parameters_are_refused():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    for blend in (
        nested,
        {"documents": nested},
        {"documents": [nested]},
        {"documents": [3], "ratio": nested},
    ):
        with pytest.raises(ParamsError, match="not a value of type list"):
            read(blend)
    while nested:  # freed level by level
        nested = nested.pop()


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, False),
        ({"lmcache": {}}, False),
        ({"lmcache": {"document": False}}, False),
        ({"lmcache": {"document": None}}, False),
        ({"lmcache": {"document": True}}, True),
    ],
)
def test_document_requests_say_so(params, expected):
    assert is_document(params) is expected


@pytest.mark.parametrize("value", [1, "true", [True], {}])
def test_malformed_document_flag_is_refused(value):
    with pytest.raises(ParamsError, match="document must be true or false, not "):
        is_document({"lmcache": {"document": value}})
