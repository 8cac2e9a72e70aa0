"""What the client sends."""

from __future__ import annotations

import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from lmcache_operator.kube.client import apply_patch


@given(st.text())
@example("a model \U0001f999")
@example("next line\x85, line separator\u2028, delete\x7f, byte order mark\ufeff")
def test_an_apply_patch_is_the_same_text_to_a_reader_of_yaml(text: str) -> None:
    assert yaml.safe_load(apply_patch({"key": text})) == {"key": text}
