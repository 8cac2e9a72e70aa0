"""What a sidecar says of the requests that were looked up, read as its page defines it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from testing.child_process import wait_until
from testing.processes import SidecarProcess


class Told(NamedTuple):
    """One request."""

    time: float
    keys: list[int]
    """Tail first."""
    tiers: str


def requests_of(answer: dict[str, Any]) -> list[Told]:
    """Of an answer of ``/samples``."""
    keys = [int(answer["key"][at : at + 16], 16) for at in range(0, len(answer["key"]), 16)]
    assert len(keys) == len(answer["tier"]) == sum(answer["num"])
    assert len(answer["ms"]) == len(answer["num"])
    told, at = [], 0
    for ms, num in zip(answer["ms"], answer["num"], strict=True):
        part = slice(at, at + num)
        told.append(Told(answer["t0"] + ms / 1000, keys[part], answer["tier"][part]))
        at += num
    return told


class Watch:
    """The requests from now on."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._sidecar = sidecar
        self._since = self._ask()["next"]

    def _ask(self, since: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._sidecar.get(f"/samples?since={since}"))
        return answer

    def next(self, number: int, num_chunks: int = 0) -> list[Told]:
        """Wait for so many, and no more; with ``num_chunks`` only those of so many chunks are looked at."""

        def answered() -> list[Told] | None:
            answer = self._ask(self._since)
            told = [one for one in requests_of(answer) if len(one.keys) == (num_chunks or len(one.keys))]
            if len(told) < number:
                return None
            self._since = answer["next"]
            return told

        told = wait_until(answered, timeout=60, what=f"{number} requests are told")
        assert len(told) == number
        return told

    def now(self) -> list[Told]:
        """All there are, of those that were not told before."""
        return requests_of(self._ask(self._since))

    def tiers(self, number: int) -> list[str]:
        """Where their chunks were found, head first."""
        return [told.tiers[::-1] for told in self.next(number)]
