"""Loads that hold blocks while their requests do not run."""

from lmcache.engines.vllm.scheduler import OpenLoads


def test_a_single_load_may_begin_even_if_it_needs_more_than_all_blocks():
    assert OpenLoads(10).may_begin("a", 11)


def test_another_load_waits_until_all_open_loads_could_be_completed():
    loads = OpenLoads(10)
    loads.begin("a", 6)
    assert loads.may_begin("b", 4)
    assert not loads.may_begin("b", 5)
    loads.end("a")  # its blocks are still in use
    assert not loads.may_begin("b", 5)
    loads.note_step(["a"], 1)  # vLLM can preempt it from now on
    assert loads.may_begin("b", 5)


def test_a_request_does_not_wait_for_its_own_load():
    loads = OpenLoads(10)
    loads.begin("a", 6)
    loads.end("a")
    assert loads.may_begin("a", 6)


def test_finished_requests_hold_no_blocks():
    loads = OpenLoads(10)
    for request in "ab":
        loads.begin(request, 5)
    loads.end("a")
    for request in "ab":
        loads.forget(request)
    assert loads.may_begin("c", 11)


def test_first_request_yields_while_loaded_requests_get_no_step():
    loads = OpenLoads(10)
    loads.begin("a", 5)
    loads.end("a")
    yields = []
    for _ in range(3):
        loads.note_step([], 0)
        yields.append(loads.must_yield("b"))
    assert yields == [True, False, True]
    assert not loads.must_yield("a")
    loads.note_step(["a"], 1)
    assert not loads.must_yield("b")
