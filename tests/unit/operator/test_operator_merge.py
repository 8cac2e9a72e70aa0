"""Merging of specs, and the first difference between a wanted and a live object."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.specs.merge import first_difference, merge

names = st.sampled_from(["a", "b", "c"])
leaves = st.none() | st.booleans() | st.integers(0, 3) | st.text("xy", max_size=2)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(names, values, max_size=3)


@given(objects, st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2))
def test_first_difference_ignores_additional_fields(wanted, other_fields):
    assert first_difference(wanted, {**other_fields, **copy.deepcopy(wanted)}) is None


@given(objects, objects)
def test_merge_modifies_neither_argument(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    copies = copy.deepcopy((base, overlay))
    merge(base, overlay)
    assert (base, overlay) == copies


@pytest.mark.parametrize(
    ("wanted", "live", "path"),
    [
        ({"a": 1}, {"a": 2}, "a"),
        ({"a": {"b": 1}}, {}, "a"),
        ({"a": {}}, {}, None),
        ({"a": []}, {}, None),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a[0]"),
        ({"a": [1]}, {"a": [1, 2]}, "a"),
        ({"e": [{"name": "x", "v": 1}]}, {"e": [{"name": "y"}, {"name": "x", "v": 1}]}, None),
        ({"e": [{"name": "x", "v": 1}]}, {"e": [{"name": "x", "v": 2}]}, "e[x].v"),
        ({"e": [{"name": "x"}]}, {"e": [{"name": "y"}]}, "e[x]"),
        ({"ports": [{"port": 1}]}, {"ports": [{"port": 1}, {"port": 2}]}, "ports"),
        ({"selector": {"a": "b"}}, {"selector": {"a": "b", "c": "d"}}, None),
        ({"r": {"limits": {"memory": "1024Mi"}}}, {"r": {"limits": {"memory": "1Gi"}}}, None),
        ({"data": {"memory": "1024Mi"}}, {"data": {"memory": "1Gi"}}, "data.memory"),
    ],
)
def test_first_difference_names_the_path(wanted: Any, live: Any, path: str | None) -> None:
    assert first_difference(wanted, live) == path
