"""Samples of looked-up requests, read from a sidecar as its page defines them."""

import json
from typing import Any, NamedTuple

from testing.child_process import wait_until
from testing.processes import SidecarProcess


class SampledRequest(NamedTuple):
    """One request in the samples."""

    time: float
    keys: list[int]
    """Keys of the sampled chunks, tail first."""
    tiers: str


def requests_of(answer: dict[str, Any]) -> list[SampledRequest]:
    """The requests in an answer of ``/samples``."""
    starts = range(0, len(answer["key"]), 16)
    keys = [int(answer["key"][start : start + 16], 16) for start in starts]
    assert len(keys) == len(answer["tier"]) == sum(answer["num"])
    assert len(answer["ms"]) == len(answer["num"])
    requests, start = [], 0
    for ms, num in zip(answer["ms"], answer["num"], strict=True):
        part = slice(start, start + num)
        requests.append(SampledRequest(answer["t0"] + ms / 1000, keys[part], answer["tier"][part]))
        start += num
    return requests


class Watch:
    """Reads the requests that are sampled from now on."""

    def __init__(self, sidecar: SidecarProcess) -> None:
        self._sidecar = sidecar
        self._since = self._ask()["next"]

    def _ask(self, since: int = 0) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self._sidecar.get(f"/samples?since={since}"))
        return answer

    def next(self, number: int) -> list[SampledRequest]:
        """Wait for exactly ``number`` requests."""

        def answered() -> list[SampledRequest] | None:
            answer = self._ask(self._since)
            requests = requests_of(answer)
            if len(requests) < number:
                return None
            self._since = answer["next"]
            return requests

        requests = wait_until(answered, timeout=60, what=f"{number} requests are sampled")
        assert len(requests) == number
        return requests

    def tiers(self, number: int) -> list[str]:
        """Tiers in which the chunks of the next requests were found, head first."""
        return [request.tiers[::-1] for request in self.next(number)]
