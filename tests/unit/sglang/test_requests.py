"""Reports of SGLang's requests, with a stand-in for its batch of prompts."""

from types import SimpleNamespace

import pytest

from lmcache_client.sglang import requests


class Request:
    """A request as SGLang's batch shows it."""

    def __init__(self, num_tokens, *, rid="5c6a", device=0, host=0, storage=0):
        self.rid = rid
        self.origin_input_ids = list(range(num_tokens))
        self.extra_key = self.cache_salt = None
        self.extend_batch_idx = 0
        self.retracted_stain = False
        self.cached_tokens_device, self.cached_tokens_host = device, host
        self.cached_tokens_storage = storage


@pytest.fixture
def prepare(give_module):
    """``prepare(*requests)``: SGLang prepares a batch. Returns what the backend reported."""

    class ScheduleBatch:
        def __init__(self, reqs):
            self.reqs, self.tree_cache = reqs, None

        def prepare_for_extend(self):
            for request in self.reqs:
                request.extend_batch_idx += 1

    give_module("sglang.srt.managers.schedule_batch", ScheduleBatch=ScheduleBatch)
    reported = []
    unsubscribe = requests.subscribe(reported.append, 64)

    def run(*batch):
        reported.clear()
        ScheduleBatch(list(batch)).prepare_for_extend()
        return [(each.num_prompt_tokens, each.num_engine_tokens, each.num_loaded_tokens) for each in reported]

    yield run
    unsubscribe()


def test_request_is_reported_once_for_all_parts_of_its_prompt_and_if_it_is_retracted(prepare):
    """SGLang retracts requests when its memory is full. It keeps the numbers of the first start."""
    request = Request(5000, storage=128)
    assert [len(prepare(request)) for _ in range(3)] == [1, 0, 0]
    request.extend_batch_idx, request.retracted_stain = 0, True
    assert prepare(request) == []


def test_tokens_are_reported_by_their_tier(prepare):
    assert prepare(Request(300, device=64, host=64, storage=128), Request(10)) == [
        (300, 128, 128),
        (10, 0, 0),
    ]


def test_health_checks_are_not_reported(prepare):
    """Probes ask several times a minute. In the list of recent requests, they would displace all others."""
    assert prepare(Request(1, rid="HEALTH_CHECK_8f14e45fceea"), Request(10)) == [(10, 0, 0)]


def test_error_ends_all_reports(prepare, caplog):
    assert prepare(SimpleNamespace(extend_batch_idx=0)) == []
    assert "Requests are not counted any more" in caplog.text
    assert prepare(Request(10)) == []
