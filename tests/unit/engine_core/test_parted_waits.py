"""Waits of an engine of several parts for answers and promotions of the other parts."""

import numpy as np
import pytest

from lmcache_client.core import parted_lookups
from lmcache_client.core.parts import (
    Hint,
    PartAnswer,
)
from lmcache_client.vllm.hand_over import announce
from tests.harness.client.parted_rig import PartedRig, known
from tests.harness.client.scheduler_rig import (
    hashes,
    make_request,
)
from tests.harness.sidecar.wire import NAMESPACE


@pytest.fixture
def rig():
    rig = PartedRig()
    yield rig
    rig.scheduler.go_offline()


def test_known_presence_needs_no_wait(rig):
    known(rig)
    assert rig.match(rig.arrive(make_request(200))) == (192, True), "no step ran since the arrival"


def test_unknown_presence_waits_for_exactly_the_answer(rig):
    rig.stored(3)
    rig.have(3)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (None, False)
    rig.step()
    rig.now += 100.0
    for _ in range(2):
        rig.output(answers={})
        assert rig.match(request) == (None, False), "a long step is no silence"
    rig.output(answers={"r": {1: rig.parts[0].answer(1, rig.parts[0].hints["r"])}})
    assert rig.match(request) == (192, True)


def test_outputs_of_steps_before_the_hint_are_no_silence():
    """Four pipeline stages run four steps at once, so the answer is in the fourth output."""
    rig = PartedRig(num_batches=4)
    rig.stored(3)
    rig.have(3)
    request = rig.arrive(make_request(200))
    rig.step()
    answers, rig.now = rig.answers, 0.5
    for arrived in ({}, {}, {}, answers):
        assert rig.match(request) == (None, False)
        rig.output(answers=arrived)
    assert rig.match(request) == (192, True)
    rig.scheduler.go_offline()


def test_chunks_that_part_0_lacks_are_not_waited_for(rig):
    known(rig, 2)
    request = rig.arrive(make_request(200))
    assert rig.match(request) == (128, True), "part 0 expects no more rows"


def test_all_parts_wait_for_rows_that_another_engine_is_storing(rig):
    rig.session.is_probing = rig.parts[0].is_probing = True
    request = rig.arrive(make_request(200, kv_transfer_params=announce(NAMESPACE, 192)))
    rig.turn()
    rig.now += 0.02
    assert rig.match(request) == (None, False)
    assert [relay.num_handed_over for relay in rig.relays] == [3]
    rig.stored(3)
    rig.have(3)
    rig.turn()
    assert rig.match(request) == (192, True)


def test_part_that_falls_silent_while_it_promotes_is_not_waited_for():
    rig = PartedRig(answer_seconds=60.0)  # rows may take long
    rig.stored(3)
    rig.parts[0].num_expected = 3
    request = rig.arrive(make_request(200))
    rig.turn()
    rig.now += 0.02
    assert rig.match(request) == (None, False)
    rig.step()
    for _ in range(3):
        assert rig.match(request) == (None, False)
        rig.output(answers={})
    rig.now += 0.2
    assert rig.match(request) == (0, False)
    rig.scheduler.go_offline()


def test_repeated_hints_do_not_prolong_the_wait(rig):
    """A part promotes rows, and falls silent just before the end of its time."""
    rig.stored(3)
    rig.parts[0].is_probing = True
    request = rig.arrive(make_request(200))
    while rig.match(request) == (None, False):
        rig.step()
        rig.output(answers=None if rig.now < 0.18 else {})
        rig.now += 0.01
    assert 0.18 < rig.now < 0.22


def test_hint_is_repeated_only_after_its_answer(rig):
    rig.now, rig.parts[0].num_expected = 1.0, 3
    request = rig.waiting()  # for promotions of part 0
    rig.step()
    answers = rig.answers
    for arrived, num_hints in (({}, 1), ({}, 1), (answers, 2)):
        rig.output(answers=arrived)
        rig.now += 0.03
        assert rig.match(request) == (None, False)
        rig.step()
        rig.drain_lookups()
        assert len(rig.relays) == num_hints


@pytest.mark.parametrize("rest", ["time", "outputs"])
def test_silent_part_counts_as_empty_after_time_and_outputs(rig, rest):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    rig.step()
    seconds, num_outputs = (0.0, 3) if rest == "time" else (0.2, 2)
    rig.now += seconds
    for _ in range(num_outputs):
        assert rig.match(request) == (None, False)
        rig.output(answers={})
    assert rig.match(request) == (None, False)
    rig.now += 0.2 - seconds
    for _ in range(3 - num_outputs):
        rig.output(answers={})
    assert rig.match(request) == (0, False)


def silent(rig):
    """Let part 1 become silent. It may have three chunks."""
    rig.stored(3)
    request = rig.arrive(make_request(200, "silenced"))
    rig.step()
    rig.now += 0.2
    for _ in range(3):
        rig.output(answers={})
    assert rig.match(request) == (0, False)


def test_silent_part_is_not_waited_for_until_it_answers(rig):
    silent(rig)
    later = rig.arrive(make_request(200, "later"))
    assert rig.match(later) == (0, False)
    rig.have(3)
    rig.step()  # its hint is relayed all the same
    rig.output()
    assert rig.match(later) == (192, True)
    rig.scheduler._lookups._presence.forget(rig.scheduler._states["later"].ticket.words[0])
    assert rig.match(rig.arrive(make_request(200, "last"))) == (None, False), (
        "the part is not silent any more"
    )


def test_known_chunks_of_a_silent_part_count(rig):
    known(rig)
    other = rig.arrive(make_request(200, "other", block_hashes=hashes(200, "other")))
    rig.stored(3, name="other")
    rig.step()
    rig.now += 0.2
    for _ in range(3):
        rig.output(answers={})
    assert rig.match(other) == (0, False)
    assert rig.match(rig.arrive(make_request(200))) == (192, True)


def test_silent_part_does_not_delay_promotions_of_others():
    rig = PartedRig(num_parts=3)
    rig.stored(3)
    rig.parts[0].num_expected = 3
    request = rig.arrive(make_request(200))
    rig.step()
    del rig.answers["r"][2]
    rig.output()
    assert rig.match(request) == (None, False)
    rig.now += 0.2
    for _ in range(3):
        rig.output(answers={})
    assert rig.match(request) == (0, False), "part 2 is silent, so rows of part 1 are of no use"
    rig.scheduler.go_offline()


def test_hint_without_place_in_a_step_is_not_silence(rig, monkeypatch):
    monkeypatch.setattr(parted_lookups, "MAX_RELAY_BYTES", 1)  # one hint with one chunk for each step
    rig.stored(3)
    rig.have(3)
    first = rig.arrive(make_request(200, "first"))
    request = rig.arrive(make_request(200))
    rig.now += 0.2
    for _ in range(3):
        assert rig.match(request) == (None, False)
        rig.turn()
    assert [relay.request_id for relay in rig.relays] == ["first"] * 3
    assert rig.match(first) == (192, True)
    rig.scheduler._lookups._presence.forget(rig.scheduler._states["r"].ticket.words[0])
    assert rig.match(request) == (0, False), "the wait is over"
    assert not rig.scheduler._lookups._silent


def test_promotions_in_a_part_are_waited_for_with_repeated_hints(rig):
    (part,) = rig.parts
    rig.session.memory_only = True
    rig.stored(3)
    part.num_expected = 3
    request = rig.arrive(make_request(264))  # part 0 lacks the last chunk
    rig.turn()
    for num_chunks in (1, 2):
        assert rig.match(request) == (None, False)
        rig.now += 0.03
        assert rig.match(request) == (None, False)
        rig.have(num_chunks)
        rig.turn()
    rig.now += 0.03
    assert rig.match(request) == (None, False)
    rig.have(3)
    rig.turn()
    assert rig.match(request) == (192, True)
    hints = [relay for relay in rig.relays if isinstance(relay, Hint)]
    assert [len(hint.chunk_keys) for hint in hints] == [1, 0, 0, 0], "repeated hints have no keys"
    assert rig.session.num_hints == 0, "the sidecar of part 0 has no lower tier"
    assert len({hint.number for hint in hints}) == 4


def test_rows_that_a_part_does_not_promote_are_not_waited_for(rig):
    rig.session.memory_only = True
    rig.stored(3)
    rig.parts[0].num_expected = 2
    request = rig.arrive(make_request(200))
    rig.turn()
    assert rig.match(request) == (None, False)
    rig.have(2)
    rig.now += 0.02
    assert rig.match(request) == (None, False)
    rig.turn()
    assert rig.match(request) == (128, True)


@pytest.mark.parametrize("is_probing", [True, False])
def test_probing_part_is_waited_for_only_if_part_0_has_more(rig, is_probing):
    rig.stored(3)
    rig.parts[0].is_probing = is_probing
    request = rig.arrive(make_request(200))
    rig.turn()
    assert rig.match(request) == ((None, False) if is_probing else (0, False))
    rig.now += 0.3
    assert rig.match(request) == (0, False), "no row arrived"


def test_time_for_a_probing_part_begins_with_the_first_hint(rig):
    """A frozen sidecar does not answer, so the part answers from the index in shared memory."""
    rig.stored(3)
    rig.parts[0].is_probing = True
    request = rig.arrive(make_request(200))
    for num_outputs in range(5):
        rig.turn()
        rig.now += 0.04
        rig.scheduler._waits._arrivals.note(1, rig.now - 0.01, rig.now)  # rows of others
        assert rig.match(request) == ((None, False) if num_outputs < 4 else (0, False))


@pytest.mark.parametrize("is_relayed_late", [True, False])
def test_time_for_a_probing_part_does_not_pass_in_the_queue(rig, is_relayed_late):
    rig.stored(3)
    rig.parts[0].is_probing = True
    request = rig.arrive(make_request(200))
    if not is_relayed_late:
        rig.turn()
    rig.now += 0.3 if is_relayed_late else 2.0
    for _ in range(3):
        rig.output(answers={})
    if not is_relayed_late:
        assert rig.match(request) == (None, False), "the answer is old"
    rig.turn()
    assert rig.match(request) == (None, False)


def test_probing_part_does_not_delay_rows_of_part_0(rig):
    """Part 0 has one chunk and expects no more."""
    rig.stored(1)
    rig.have(1)
    rig.parts[0].is_probing = True
    request = rig.arrive(make_request(200))
    rig.turn()
    assert rig.match(request) == (64, True)


def test_part_0_that_expects_rows_is_waited_for_as_far_as_the_others_have_them(rig):
    rig.session.num_pending = 3
    request = rig.arrive(make_request(200))
    rig.have(1)
    rig.turn()
    assert rig.match(request) == (None, False)
    rig.stored(1)
    assert rig.match(request) == (64, True)


def bad_answers(hint):
    """Return answers that must be ignored, by request and part."""
    full = (np.packbits([True] * 3).tobytes(),)
    return {
        "unknown request": {"other": {1: PartAnswer(hint.number, full, 3, False)}},
        "earlier hint": {"r": {1: PartAnswer(hint.number - 1, full, 3, False)}},
        "too many groups": {"r": {1: PartAnswer(hint.number, full * 2, 3, False)}},
        "no groups": {"r": {1: PartAnswer(hint.number, (), 3, False)}},
        "too many chunks": {"r": {1: PartAnswer(hint.number, (full[0] * 2,), 3, False)}},
        "part 0": {"r": {0: PartAnswer(hint.number, full, 3, False)}},
        "part 2 of 2": {"r": {2: PartAnswer(hint.number, full, 3, False)}},
    }


@pytest.mark.parametrize("fault", bad_answers(Hint("", 0, b"", ())))
def test_bad_answers_are_ignored(rig, fault):
    rig.stored(3)
    request = rig.arrive(make_request(200))
    (hint,) = rig.step().relays
    rig.output(answers=bad_answers(hint)[fault])
    assert rig.match(request) == (None, False)
    rig.have(2)
    rig.output(answers={"r": {1: rig.parts[0].answer(hint.number, hint.chunk_keys)}})
    assert rig.match(request) == (128, True)
