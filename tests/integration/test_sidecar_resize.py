"""A real sidecar's memory tier is made larger and smaller while clients use it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache.rpc import kvcache_pb2 as pb
from lmcache.tiers.memory.contracts import Slot
from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.engine import CHUNK_BYTES, assert_stored, load, session_of, store
from tests.harness.sized import MIB, Sized
from tests.harness.wire import RawClient, make_keys


@pytest.fixture
def sized(tmp_path: Path) -> Iterator[Sized]:
    path = tmp_path / "memory-size"
    options = {"memory_size": "16Mi", "memory_max_size": "64Mi", "memory_size_file": path}
    with SidecarProcess(**options) as sidecar:
        yield Sized(sidecar, path)


def test_it_grows_and_what_is_in_it_stays(sized):
    assert "memory-size can't be read" in sized.memory["resize_problem"]
    sized.ask("16Mi")
    with session_of(sized.sidecar) as session:
        before = sized.settle(16)
        assert before["max_bytes"] == 64 * MIB
        few, many = range(4), range(before["capacity_rows"] + 8)
        store(session, *few)
        sized.ask("64Mi")
        after = sized.settle(64)
        assert after["usable_rows"] == after["capacity_rows"] > len(many)
        assert_stored(load(session, session, "r", *few), *few)
        store(session, *many[len(few) :])
        assert_stored(load(session, session, "s", *many), *many)
        assert not any(sized.memory["removed"].values())
        assert sized.memory["used_rows"] == len(many)


def test_a_restarted_one_has_the_size_of_the_file(sized):
    sized.ask("48Mi")
    sized.settle(48)
    with session_of(sized.sidecar) as session:
        rows = range(sized.settle(48)["capacity_rows"])
        store(session, *rows)
        sized.sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
    sized.sidecar.restart()
    with session_of(sized.sidecar) as session:
        assert sized.settle(48)["capacity_rows"] == len(rows)
        few = rows[:50]
        keys = [(0, make_keys(*few))]
        wait_until(lambda: session.lookup("r", keys).num_leased == len(few), timeout=60)
        assert_stored(load(session, session, "r", *few), *few)


def test_what_can_not_be_used_changes_nothing(sized):
    sized.ask("24Mi")
    sized.settle(24)
    for text, problem in (("65Mi", "65Mi is more than 64Mi"), ("lots", "'lots' is not a size")):
        sized.ask(text)
        sized.sidecar.wait_until(lambda stats, why=problem: why in stats["memory"]["resize_problem"])
        assert sized.memory["target_bytes"] == 24 * MIB
    sized.ask("32Mi")
    sized.settle(32)


def test_it_shrinks_and_grows_again_with_the_right_bytes(sized):
    sized.ask("64Mi")
    with session_of(sized.sidecar) as session:
        large = sized.settle(64)["capacity_rows"]
        first, second = range(large), range(large, 2 * large)
        store(session, *first)
        sized.ask("16Mi")
        small = sized.settle(16)
        assert small["usable_rows"] == small["capacity_rows"] < large // 3
        assert small["used_rows"] == small["capacity_rows"]
        kept = slots_of_those_that_stayed(session, first)
        assert len(kept) == small["used_rows"]
        assert_stored([session.slots[slot.row, :CHUNK_BYTES] for slot in kept.values()], *kept)
        sized.ask("64Mi")
        sized.settle(64)
        store(session, *second)
        kept = slots_of_those_that_stayed(session, second)
        assert len(kept) == large
        assert_stored([session.slots[slot.row, :CHUNK_BYTES] for slot in kept.values()], *kept)


def test_rows_in_use_are_waited_for(sized):
    sized.ask("64Mi")
    with session_of(sized.sidecar) as session:
        last = sized.settle(64)["capacity_rows"] - 1
        store(session, *range(last + 1))
        found = slots_of_those_that_stayed(session, range(last + 1))
        (number,) = (number for number, slot in found.items() if slot.row == last)
        keys = make_keys(number)
        assert session.lookup("reader", [(0, keys)]).num_leased == 1
        with session.copying():
            sized.ask("32Mi")
            sized.sidecar.wait_until(
                lambda stats: (
                    stats["memory"]["resize_problem"]
                    == "rows beyond the size that is asked for are in use: 1 leased"
                )
            )
            assert sized.memory["target_bytes"] == 32 * MIB
            assert sized.memory["size_bytes"] == 64 * MIB
            assert_stored([session.slots[last, :CHUNK_BYTES]], number)
            session.release(["reader"])
            sized.sidecar.wait_until(
                lambda stats: "attached, to let go of it" in stats["memory"]["resize_problem"]
            )
            assert sized.taken_bytes() > 63 * MIB
            assert_stored([session.slots[last, :CHUNK_BYTES]], number)  # a copy under way reads no zeros
            assert not session.holds(found[number])
        sized.settle(32)


def test_a_client_that_can_not_let_go_is_a_reason_to_stay(sized):
    sized.ask("32Mi")
    sized.settle(32)
    with RawClient(sized.sidecar) as old:
        old.hello.can_let_go = False
        next(old.open(pb.AttachRequest(hello=old.hello)))
        sized.ask("16Mi")
        sized.sidecar.wait_until(lambda stats: "can't let go of memory" in stats["memory"]["resize_problem"])
        memory = sized.memory
        assert memory["size_bytes"] == 32 * MIB
        assert memory["usable_rows"] == memory["capacity_rows"] == memory["ready_rows"]
    sized.settle(16)


def test_a_client_that_never_answers_holds_it_until_it_is_dead(sized):
    sized.ask("32Mi")
    sized.settle(32)
    with RawClient(sized.sidecar) as silent:
        stream = silent.open(pb.AttachRequest(hello=silent.hello))
        silent.epoch = next(stream).attached.epoch
        sized.ask("16Mi")
        sized.sidecar.wait_until(lambda stats: "to let go of it" in stats["memory"]["resize_problem"])
        asked = next(reply for reply in stream if reply.extents.round)
        assert asked.extents.ready_rows == sized.memory["ready_rows"]
        silent.say(let_go=pb.LetGo(round=asked.extents.round - 1))
        silent.say(drained=pb.Drained(epoch=silent.epoch))
        assert "attached, to let go of it" in sized.memory["resize_problem"]
        assert sized.taken_bytes() > 31 * MIB
        sized.ask("24Mi")
        sized.sidecar.wait_until(lambda stats: stats["memory"]["target_bytes"] == 24 * MIB)
        silent.say(let_go=pb.LetGo(round=asked.extents.round))  # of a round that is over
        asked = next(reply for reply in stream if reply.extents.round > asked.extents.round)
        assert "to let go of it" in sized.memory["resize_problem"]
        assert sized.taken_bytes() > 31 * MIB
    sized.settle(24)


def test_one_that_is_killed_in_mid_shrink_goes_on_with_it(sized):
    sized.ask("64Mi")
    with session_of(sized.sidecar) as session:
        large = sized.settle(64)["capacity_rows"]
        store(session, *range(large))
        with session.copying():
            sized.ask("16Mi")
            sized.sidecar.wait_until(lambda stats: "to let go of it" in stats["memory"]["resize_problem"])
            sized.sidecar.restart()
            sized.sidecar.wait_until(lambda stats: stats["memory"]["resize_problem"])
            assert sized.taken_bytes() > 63 * MIB
        sized.settle(16)
    with session_of(sized.sidecar) as session:
        store(session, 1000, 1001)
        assert_stored(load(session, session, "r", 1000, 1001), 1000, 1001)


def test_sizes_that_flap_end_with_the_last(sized):
    with session_of(sized.sidecar) as session:
        for step, mebibytes in enumerate((64, 16, 48, 17, 64, 20, 16, 64, 33)):
            sized.ask(f"{mebibytes}Mi")
            size = mebibytes * MIB
            sized.sidecar.wait_until(lambda stats, size=size: stats["memory"]["target_bytes"] == size)
            numbers = range(step * 60, (step + 1) * 60)
            store(session, *numbers)
            assert sized.taken_bytes() <= 65 * MIB
        sized.settle(33)
        assert_stored(load(session, session, "r", *numbers), *numbers)


def slots_of_those_that_stayed(session, numbers) -> dict[int, Slot]:
    """By number of the chunk."""
    found = session.index.find_each(np.frombuffer(make_keys(*numbers), "<u8").reshape(-1, 8))
    return {
        number: Slot(int(row), int(generation))
        for number, is_there, row, generation in zip(numbers, *found, strict=True)
        if is_there
    }
