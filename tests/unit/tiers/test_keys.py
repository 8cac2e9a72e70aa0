import hypothesis.strategies as st
import pytest
from hypothesis import example, given

from lmcache_store.keys import chunk_keys, namespace, part_namespace, salt_hash, tenant, tenant_of_hash


def chunk_key(block_hash: bytes, *qualifiers, **context) -> bytes:
    """Return the key of one chunk."""
    return chunk_keys([block_hash], *qualifiers, **context)[0]


LISTING = {
    "model": {"layers": 32, "dtype": "bfloat16", "rope": 1e6, "tied": False, "window": None},
    "weights": b"\x00\x01",
    "sizes": [2, 1],
}


@pytest.mark.parametrize(
    ("encoded", "golden"),
    [
        (chunk_key(b"h" * 32), "5ac35dddce2a88683afa8dd7f043192f0670454d7c5b49f69bd8a8d51d7f4cfa"),
        (
            chunk_key(b"h" * 32, b"lora", "salt", 3),
            "093462369c4864b1cdad92cdc043bd29ce99b9967c02faab4e7c707beaf20c80",
        ),
        (namespace(LISTING), "0d28ac42e7c329353ea16f194038c16f9c145b658d6c35d494672bcef49fe3e3"),
        (tenant("salt", b"secret"), "f7e438dfe9112fb2ded3a844dbcab4ad2bd23186a2820e5c812238268c1f21ec"),
        (salt_hash("salt"), "2599f24d64ea56eaf777abb3eab9a6f7d117d17515c0481a1e7ba92fad5a21b9"),
        (part_namespace(b"n" * 32, 1), "e1c9d6d447057550d7f974018ca05036be8f87105e585461cc5d4c4055e261a1"),
    ],
    ids=["plain chunk", "full chunk", "namespace", "tenant", "salt", "part"],
)
def test_formats_never_change(encoded, golden):
    # Objects in all existing tiers are lost if this format changes, so a change needs a new tag and a line in
    # the changelog.
    assert encoded.hex() == golden


fields = st.tuples(st.binary(max_size=40), st.binary(max_size=8), st.text(max_size=8), st.integers(0, 300))


@given(fields, fields)
@example((b"ab", b"c", "", 0), (b"a", b"bc", "", 0))
@example((b"a", b"b", "c", 1), (b"a", b"", "bc", 1))
@example((b"", b"", "1", 0), (b"", b"", "", 10))
def test_different_chunks_have_different_keys(first, second):
    assert (chunk_key(*first) == chunk_key(*second)) == (first == second)
    assert chunk_keys([second[0], first[0]], *first[1:])[1] == chunk_key(*first)


listings = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


def typed(value: object) -> object:
    """Return the value with its types, as the namespace compares it: 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return ("map", frozenset((key, typed(item)) for key, item in value.items()))
    if isinstance(value, list):
        return ("list", tuple(map(typed, value)))
    return (type(value), repr(value))


@given(
    st.dictionaries(st.text(max_size=3), listings, max_size=3),
    st.dictionaries(st.text(max_size=3), listings, max_size=3),
)
@example({"a": 1}, {"a": True})
@example({"a": 1}, {"a": 1.0})
@example({"a": "1"}, {"a": b"1"})
@example({"a": [1, [2]]}, {"a": [[1], 2]})
@example({"a": {"b": 1}, "c": 2}, {"a": {"b": 1, "c": 2}})
@example({"a": 0.0}, {"a": -0.0})
def test_different_listings_have_different_namespaces(first, second):
    assert (namespace(first) == namespace(second)) == (typed(first) == typed(second))


def test_order_of_keys_does_not_matter():
    assert namespace(LISTING) == namespace(dict(reversed(LISTING.items())))


@pytest.mark.parametrize(
    ("listing", "message"),
    [
        ({"a": {"b": {1, 2}}}, r"listing\.a\.b: a set"),
        ({"a": [1, object()]}, r"listing\.a\[1\]: a object"),
        ({"a": {3: 1}}, r"listing\.a: key 3 is a int"),
    ],
)
def test_error_names_values_without_canonical_form(listing, message):
    with pytest.raises(TypeError, match=message):
        namespace(listing)


def test_accepts_salts_of_any_text():
    assert len({chunk_key(b"h", cache_salt=salt) for salt in ("", "\ud800", "\udfff", "é", "e\u0301")}) == 5


def test_tenant_is_empty_without_salt_and_differs_by_secret():
    assert tenant("", b"secret") == b""
    assert tenant("a", b"one") != tenant("a", b"two")
    assert tenant("a", b"one") == tenant_of_hash(salt_hash("a"), b"one")
