"""Patches that the client sends to the API server."""

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from lmcache_operator.kube.client import apply_patch


@given(st.text())
@example("a model \U0001f999")
@example("next line\x85, line separator\u2028, delete\x7f, byte order mark\ufeff")
def test_apply_patch_preserves_text_for_a_yaml_reader(text: str) -> None:
    assert yaml.safe_load(apply_patch({"key": text})) == {"key": text}
