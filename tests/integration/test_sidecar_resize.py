"""A real sidecar's memory tier is made larger while clients use it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.child_process import wait_until
from testing.processes import SidecarProcess
from tests.harness.engine import assert_stored, load, session_of, store
from tests.harness.wire import make_keys

MIB = 1 << 20


class Sized:
    """A sidecar, and the file with its size as a kubelet writes it: a new one takes the place of the old."""

    def __init__(self, sidecar: SidecarProcess, path: Path) -> None:
        self.sidecar, self.path = sidecar, path

    def ask(self, text: str) -> None:
        new = self.path.with_suffix(".new")
        new.write_text(text)
        os.replace(new, self.path)

    @property
    def memory(self) -> dict:
        return self.sidecar.stats()["memory"]

    def settle(self, mebibytes: int) -> dict:
        """Wait until it is as large as it is to be."""
        size = mebibytes * MIB

        def is_settled(memory: dict) -> bool:
            is_so = memory["target_bytes"] == memory["size_bytes"] == size
            return is_so and not memory["resize_problem"]

        self.sidecar.wait_until(lambda stats: is_settled(stats["memory"]))
        memory = self.memory
        assert self.taken_bytes() <= size + MIB
        return memory

    def taken_bytes(self) -> int:
        return self.sidecar.arena_path.stat().st_blocks * 512


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
    for text, problem in (("65Mi", "65Mi is more than 64Mi"), ("lots", "'lots' is not a size"), ("", "''")):
        sized.ask(text)
        sized.sidecar.wait_until(lambda stats, why=problem: why in stats["memory"]["resize_problem"])
        assert sized.memory["target_bytes"] == 24 * MIB
    sized.ask("32Mi")
    sized.settle(32)
