"""Options of SGLang that change KV although the model's files are the same."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from lmcache import keys
from lmcache.engines.sglang import naming


@pytest.fixture
def namespace(monkeypatch):
    """``namespace(**options)``: the namespace of an engine with one adapter and these options."""
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    sys.modules["sglang"].__version__ = "0.5.23"
    monkeypatch.setattr(naming, "page_hash", lambda: "hash")

    def make(loras=(["name", "path", "content"],), **options):
        server_args = SimpleNamespace(
            context_length=None, dtype="float32", quantization=None, kv_cache_dtype="auto",
            quantization_param_path=None, **options,
        )  # fmt: skip
        listing = naming.listing(
            server_args,
            {},
            config={},
            weights="w",
            draft="",
            loras=list(loras),
            sizes={"pipeline_parallel": 1},
        )
        return keys.namespace(listing)

    return make


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("kt_weight_path", "/experts"),
        ("uno_lora_path", "/adapter"),
        ("forward_hooks", [{"hook": "steer"}]),
    ],
)
def test_kv_that_does_not_follow_from_the_files_is_private(option, value):
    assert option in naming.private_reason(SimpleNamespace(**{option: value}), is_from_start=True)
    assert not naming.private_reason(SimpleNamespace(**{option: None}), is_from_start=True)


def test_another_implementation_of_the_model_has_a_namespace_of_its_own(namespace):
    """An implementation may order the elements of a key otherwise, for the same answers."""
    assert namespace(model_impl="sglang") != namespace(model_impl="transformers")


def test_modules_that_an_adapter_changes_are_part_of_the_namespace(namespace):
    assert namespace(lora_target_modules={"q_proj"}) != namespace(lora_target_modules={"k_proj", "q_proj"})
    assert namespace(lora_target_modules={"a", "b"}) == namespace(lora_target_modules={"b", "a"})
    assert namespace(experts_shared_outer_loras=True) != namespace(experts_shared_outer_loras=False)
    assert namespace(loras=(), lora_target_modules={"a"}) == namespace(loras=(), lora_target_modules={"b"})
