"""Extra keys of requests to the base model are no extra keys of requests to an adapter."""

import itertools
from types import SimpleNamespace

import pytest

from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang import adapters, attach

ADAPTER, OTHER = "1f" * 16, "2e" * 16


@pytest.fixture
def request_class(give_module):
    class Req:
        """A request as SGLang creates it."""

        def __init__(self, extra_key=None, lora_id=None):
            self.extra_key = extra_key if lora_id is None else (extra_key or "") + lora_id
            self.lora_id = lora_id

    give_module("sglang.srt.managers.schedule_batch", Req=Req)
    return Req


def test_no_two_extra_keys_or_adapters_have_one_name(request_class):
    adapters.separate(has_adapters=True)
    adapters.separate(has_adapters=True)  # another backend of the same process
    keys = [None, "", "x", "x|", "x||", ADAPTER, f"x{ADAPTER}", f"{ADAPTER}|", f"{OTHER}{ADAPTER}"]
    requests = [
        request_class(key, lora_id=adapter)
        for key, adapter in itertools.product(keys, (None, ADAPTER, OTHER))
        if key != "" or adapter is None  # SGLang takes "" for no key
    ]
    assert len({request.extra_key for request in requests}) == len(requests)
    assert request_class().extra_key is None, "most requests keep their names"
    assert request_class("x", lora_id=ADAPTER).extra_key == f"x{ADAPTER}", "KV events end with the id"


def test_engine_without_adapters_has_keys_of_the_base_model_only(request_class):
    adapters.separate(has_adapters=False)
    requests = [
        request_class(ADAPTER),
        request_class(None, lora_id=ADAPTER),
        request_class(ADAPTER, lora_id=""),
    ]
    assert {request.extra_key for request in requests} == {f"{ADAPTER}|"}


def test_running_engine_with_adapters_is_refused():
    """The caches of such an engine may have pages of the base model under the name of an adapter."""
    ranks = SimpleNamespace(num_columns=1)
    with pytest.raises(UnsupportedError, match="start SGLang with the backend"):
        attach._check_options({"interface_v1": 1}, SimpleNamespace(enable_lora=True), ranks)
    attach._check_options({"interface_v1": 1}, SimpleNamespace(enable_lora=False), ranks)
