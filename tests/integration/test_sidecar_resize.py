"""A real sidecar's memory tier grows and shrinks while clients use it."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from lmcache_store.tiers.memory.contracts import Slot
from testing.processes import SidecarProcess
from tests.harness.engine import CHUNK_BYTES, assert_stored, load, mapped_slots, session_of, store
from tests.harness.sidecar.resized_sidecar import MIB, ResizedSidecar
from tests.harness.sidecar.wire import make_keys


@pytest.fixture
def sized(tmp_path: Path) -> Iterator[ResizedSidecar]:
    path = tmp_path / "memory-size"
    options = {"memory_size": "16Mi", "memory_max_size": "64Mi", "memory_size_file": path}
    with SidecarProcess(**options) as sidecar:
        yield ResizedSidecar(sidecar, path)


def test_shrinking_waits_for_rows_in_use(sized):
    sized.write_size("64Mi")
    with session_of(sized.sidecar) as session:
        last_row = sized.settle(64)["capacity_rows"] - 1
        store(session, *range(last_row + 1))
        slots = resident_slots(session, range(last_row + 1))
        (number,) = (number for number, slot in slots.items() if slot.row == last_row)
        keys = make_keys(number)
        assert session.lookup("reader", [(0, keys)]).num_leased == 1
        with session.copying():
            sized.write_size("32Mi")
            sized.wait_problem("rows beyond the target size are in use: 1 leased")
            assert sized.memory["target_bytes"] == 32 * MIB
            assert sized.memory["size_bytes"] == 64 * MIB
            assert_stored([mapped_slots(session)[last_row, :CHUNK_BYTES]], number)
            session.release(["reader"])
            sized.wait_problem("(attached)")
            assert sized.used_bytes() > 63 * MIB
            # A copy in progress must not read zeros.
            assert_stored([mapped_slots(session)[last_row, :CHUNK_BYTES]], number)
            assert not session.holds(slots[number])
        sized.settle(32)


def test_sidecar_killed_while_shrinking_continues_after_its_restart(sized):
    sized.write_size("64Mi")
    with session_of(sized.sidecar) as session:
        large = sized.settle(64)["capacity_rows"]
        store(session, *range(large))
        with session.copying():
            sized.write_size("16Mi")
            sized.wait_problem("is not yet released by")
            sized.sidecar.restart()
            sized.wait_problem()
            assert sized.used_bytes() > 63 * MIB
        sized.settle(16)
    with session_of(sized.sidecar) as session:
        store(session, 1000, 1001)
        assert_stored(load(session, session, "r", 1000, 1001), 1000, 1001)


def resident_slots(session, numbers) -> dict[int, Slot]:
    """Slots of the chunks that are in memory, by chunk number."""
    columns = session.index.find_each(np.frombuffer(make_keys(*numbers), "<u8").reshape(-1, 8))
    return {
        number: Slot(int(row), int(generation))
        for number, is_resident, row, generation in zip(numbers, *columns, strict=True)
        if is_resident
    }
