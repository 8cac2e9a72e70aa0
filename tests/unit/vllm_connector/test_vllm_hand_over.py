"""The hand-over of a prompt from a prefill engine to a decode engine, by vLLM's ``kv_transfer_params``."""

import pytest

from lmcache_client.vllm.hand_over import announce, num_announced_tokens
from lmcache_store.common.timing import TIMING
from tests.harness.client.scheduler_rig import Rig, blocks, hashes, make_identity, make_request
from tests.harness.sidecar.wire import NAMESPACE

TO_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}


@pytest.fixture
def new_rig():
    """The constructor of engines that hand over prompts, and blend none."""
    return Rig


def prefill(rig, request):
    """Compute the whole prompt. Returns what the engine announces."""
    rig.arrive(request)
    num_tokens, is_loaded = rig.match(request)
    ids = blocks(-(-request.num_tokens // 32))
    rig.allocate(request, ids, num_tokens)
    assert not is_loaded
    rig.step([(request.request_id, ids, 0, request.num_tokens)])
    request.num_computed_tokens = request.num_tokens
    return rig.scheduler.hand_over(request)


def test_prefill_engine_announces_its_full_chunks(make_rig):
    params = prefill(make_rig(), make_request(200, kv_transfer_params=TO_DECODE))
    assert (num_announced_tokens(params, NAMESPACE), list(params)) == (192, ["lmcache"])


@pytest.mark.parametrize(
    ("num_tokens", "params"),
    [
        *((200, other) for other in (None, {}, {"do_remote_decode": False}, {"do_remote_prefill": True})),
        (63, TO_DECODE),
    ],
)
def test_nothing_is_announced_of_short_prompts_or_to_no_decode_engine(make_rig, num_tokens, params):
    assert prefill(make_rig(), make_request(num_tokens, kv_transfer_params=params)) is None


def test_nothing_is_announced_of_kv_that_others_cannot_find(make_rig):
    def request():
        return make_request(200, kv_transfer_params=TO_DECODE)

    assert prefill(make_rig(make_identity(private_reason="a test")), request()) is None
    reset, offline = make_rig(), make_rig()
    reset.scheduler.reset_cache()
    assert prefill(reset, request()) is None
    arrived = offline.arrive(request())
    offline.scheduler.go_offline()
    assert offline.scheduler.hand_over(arrived) is None


@pytest.mark.parametrize("is_memory_only", [True, False])
def test_decode_engine_waits_for_rows_that_are_still_stored(make_rig, is_memory_only):
    rig = make_rig()
    rig.session.memory_only = is_memory_only
    rig.session.is_probing = not is_memory_only
    request = arrive_and_wait(rig)
    rig.stored(2)
    rig.now = 0.01
    assert rig.match(request) == (None, False)
    rig.stored(3)
    assert rig.match(request) == (192, True)
    assert is_memory_only or rig.session.num_handed_over == 3


def set_rows_under_way(rig, state):
    """Let the sidecar answer that it knows only rows in memory, asks lower tiers or promotes three rows."""
    rig.session.memory_only = state == "memory only"
    rig.session.is_probing = state == "probing"
    rig.session.num_pending = 3 if state == "promoting" else 0


def arrive_and_wait(rig):
    """Return a request with three announced rows. It waits for them."""
    request = rig.arrive(make_request(200, kv_transfer_params=announce(NAMESPACE, 192)))
    assert rig.match(request) == (None, False)
    return request


@pytest.mark.parametrize("state", ["memory only", "probing", "promoting"])
def test_rows_of_other_requests_do_not_prolong_the_wait(make_rig, state):
    """Other requests get a row every 40 ms. The announced rows never arrive."""
    rig = make_rig()
    set_rows_under_way(rig, state)
    fields = {"kv_transfer_params": announce(NAMESPACE, 192)}
    forged = rig.arrive(make_request(200, "forged", **fields))
    served = 0
    while rig.match(forged) == (None, False):
        name = f"good {served}"
        good = rig.arrive(make_request(200, name, block_hashes=hashes(200, name), **fields))
        for num_chunks in (1, 2, 3):
            rig.match(good)
            rig.now += 0.04
            rig.stored(num_chunks, name)
            rig.match(forged)
            rig.drain_lookups()
        assert rig.match(good) == (192, True)
        rig.scheduler.finish(good, ([],))
        served += 1
        assert rig.now < 1, "the wait must end"
    assert served > 0, "the other requests must get rows meanwhile"


@pytest.mark.parametrize(
    ("state", "settings", "steps"),
    [
        pytest.param("memory only", {}, [(0.0055, 0, None), (0.0065, 0, 0)], id="no row in memory only"),
        pytest.param("probing", {}, [(0.0055, 0, None), (0.0065, 0, 0)], id="no row while tiers are asked"),
        pytest.param("memory only", {}, [(0.003, 1, None), (0.0065, 2, 128)], id="slow rows"),
        pytest.param(
            "memory only", {"answer_seconds": 5.0}, [(4.9, 0, None), (5.0, 0, 0)], id="limit of the user"
        ),
    ],
)
def test_wait_takes_no_longer_than_computing_or_the_limit_of_the_user(make_rig, state, settings, steps):
    rig = make_rig(**settings)
    set_rows_under_way(rig, state)
    rig.scheduler._rate.tokens_per_second = 64 / 0.002  # a chunk in 2 ms
    request = arrive_and_wait(rig)
    for now, num_stored, num_offered in steps:
        rig.now = now
        rig.stored(num_stored)
        assert rig.match(request) == (num_offered, bool(num_offered))


def test_wait_without_rows_is_short_even_if_computing_takes_long_and_is_not_repeated(rig):
    rig.scheduler._rate.tokens_per_second = 64 / 10.0
    request = arrive_and_wait(rig)
    rig.now = TIMING.first_row_seconds
    assert rig.begin(request) == 0
    rig.step([("r", blocks(7), 0, 200)])
    rig.step(preempted=["r"])
    assert rig.match(request) == (0, False)


def test_decode_engine_does_not_wait_for_later_chunks(rig):
    rig.stored(1)
    request = rig.arrive(make_request(200, kv_transfer_params=announce(NAMESPACE, 64)))
    assert rig.match(request) == (64, True)


def test_after_a_reset_nothing_is_waited_for(rig):
    request = rig.arrive(make_request(200, kv_transfer_params=announce(NAMESPACE, 192)))
    rig.scheduler.reset_cache()
    assert rig.match(request) == (0, False)


@pytest.mark.parametrize(
    "params",
    [
        None,
        [],
        "lmcache",
        {"lmcache": None},
        {"lmcache": {}},
        {"lmcache": {"namespace": NAMESPACE.hex()}},
        *(announce(NAMESPACE, number) for number in ("192", -192, True, 192.0)),
        {"lmcache": {"namespace": 7, "num_tokens": 192}},
        announce(b"another" + bytes(25), 192),
    ],
)
def test_invalid_announcements_and_those_of_other_models_are_ignored(rig, params):
    request = rig.arrive(make_request(200, kv_transfer_params=params))
    assert rig.match(request) == (0, False)


def test_huge_announcements_end_with_the_prompt(make_rig):
    rig = make_rig()
    request = rig.arrive(make_request(200, kv_transfer_params=announce(NAMESPACE, 1 << 80)))
    rig.match(request)
    rig.drain_lookups()
    assert rig.session.num_handed_over == 3
