"""What sidecars say of themselves: read with suspicion, told honestly, never in anybody's way."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from lmcache_operator.components.base import Probed
from lmcache_operator.reconcile.probe import SidecarProber
from lmcache_operator.stats import StatsClient

from tests.harness.operator_plans import LATE, settled_world, status_of

GOOD = {"is_ready": True, "not_ready_reason": "", "num_clients": {"attached": 2}, "remote": None}
BAD = GOOD | {"is_ready": False, "not_ready_reason": "--remote-url: no such scheme"}


class Rig:
    """Pods at rest, what their sidecars answer, and who asks them."""

    def __init__(self, *answers: Any, is_ready: bool = True) -> None:
        self.world = settled_world(engine={"replicas": len(answers)})
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.now = 0.0
        self.prober = SidecarProber(self._ask, lambda: self.now)
        for number, answer in enumerate(answers):
            self.world.pods[f"demo-engine-{number}"]["status"] = {
                "phase": "Running", "podIP": f"10.0.0.{number}",
                "conditions": [{"type": "Ready", "status": str(is_ready)}],
            }  # fmt: skip
            self.answers[f"10.0.0.{number}"] = answer

    async def _ask(self, address: str) -> Any:
        self.asked.append(address)
        return self.answers[address]

    def probe(self) -> Probed:
        return asyncio.run(self.prober.probe(tuple(self.world.pods.values())))

    def told(self, kind: str = "SidecarAttached") -> tuple[str, str, str]:
        """Status, reason and message after one more look; the status is kept as the API server would."""
        self.world.resource["status"] = status_of(self.world, probed=self.probe(), now=LATE)
        found = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return tuple(found[0][key] for key in ("status", "reason", "message")) if found else ("", "", "")


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ([GOOD, GOOD], ("True", "Attached", "2 of 2 engines use their sidecars")),
        (
            [GOOD, BAD],
            (
                "False", "SidecarNotReady",
                "1 of 2 sidecars are not ready: pod demo-engine-1: --remote-url: no such scheme",
            ),
        ),
        ([None, BAD], ("False", "SidecarNotReady", None)),
        ([GOOD, None], ("Unknown", "NoAnswer", None)),
        ([GOOD, GOOD | {"num_clients": {"attached": 0}}], ("False", "EngineNotAttached", None)),
        ([GOOD | {"is_ready": False, "not_ready_reason": [1]}], ("False", "SidecarNotReady", None)),
        ([GOOD, []], ("Unknown", "NoAnswer", None)),
        ([{"num_clients": 3, "remote": "x", "is_ready": True}], ("False", "EngineNotAttached", None)),
        ([{"num_clients": {"attached": "x"}, "is_ready": "x"}], ("False", "SidecarNotReady", None)),
    ],
)  # fmt: skip
def test_what_sidecars_say_is_told(answers: list[Any], told: tuple[str, str, str | None]) -> None:
    rig = Rig(*answers)
    status, reason, message = rig.told()
    assert (status, reason, message if told[2] else None) == told
    is_false = status == "False"
    assert rig.told("Degraded")[:2] == (str(is_false), reason if is_false else "AsDeclared")
    assert rig.told("Ready")[:2] == ("True", "Ready")
    assert rig.told("EngineAvailable")[0] == "True"


def test_nothing_is_claimed_before_an_engine_runs() -> None:
    rig = Rig(GOOD | {"num_clients": {"attached": 0}}, is_ready=False)
    assert rig.told()[:2] == ("Unknown", "NoEngine")
    rig.world.pods["demo-engine-0"]["status"]["phase"] = "Pending"
    assert rig.told()[:2] == ("Unknown", "NoEngine")
    assert len(rig.asked) == 1


def test_whether_the_remote_tier_answers_is_told() -> None:
    rig = Rig(GOOD, GOOD)
    assert rig.told("RemoteTierReachable") == ("", "", "")
    rig.answers["10.0.0.0"] = GOOD | {"remote": {"is_reachable": True}}
    assert rig.told("RemoteTierReachable")[:2] == ("True", "Reachable")
    lost = {"is_reachable": False, "off_reason": "NOAUTH was the answer to AUTH"}
    rig.answers["10.0.0.1"] = GOOD | {"remote": lost}
    told = rig.told("RemoteTierReachable")
    assert told == (
        "False",
        "RemoteTierUnreachable",
        "1 of 2 sidecars get no answer from it: pod demo-engine-1: NOAUTH was the answer to AUTH",
    )
    assert rig.told("Degraded")[:2] == ("True", "RemoteTierUnreachable")
    assert rig.told("Ready")[0] == "True"


def test_whether_the_disk_tier_is_in_use_is_told() -> None:
    rig = Rig(GOOD, GOOD)
    assert rig.told("DiskTierAvailable") == ("", "", "")
    rig.answers["10.0.0.0"] = GOOD | {"disk": {"is_reachable": True, "off_reason": ""}}
    assert rig.told("DiskTierAvailable") == ("True", "Available", "all 1 disk tiers are in use")
    lost = {"is_reachable": False, "off_reason": "[Errno 30] Read-only file system"}
    rig.answers["10.0.0.1"] = GOOD | {"disk": lost}
    told = rig.told("DiskTierAvailable")
    why = "1 of 2 disk tiers are off: pod demo-engine-1: [Errno 30] Read-only file system"
    assert told == ("False", "DiskTierOff", why)
    assert rig.told("Degraded")[:2] == ("True", "DiskTierOff")
    assert rig.told("Ready")[0] == "True"


def test_memory_that_cuda_could_not_pin_is_a_condition_with_a_remedy() -> None:
    rig = Rig(GOOD, GOOD)
    assert rig.told("MemoryTierPinned") == ("", "", "")
    pinned = {"pinned_bytes": {"engine": 1 << 30, "reader": 0}, "pin_problem": ""}
    rig.answers["10.0.0.0"] = GOOD | {"transfer": pinned}
    assert rig.told("MemoryTierPinned") == ("True", "Pinned", "the memory tiers of all 1 GPU pods are pinned")
    problem = "the worker of column 0, pid 7, could not pin 3 parts of the memory tier: OUT_OF_MEMORY (2)"
    rig.answers["10.0.0.1"] = GOOD | {"transfer": {"pin_problem": problem}}
    status, reason, message = rig.told("MemoryTierPinned")
    assert (status, reason) == ("False", "MemoryNotPinned")
    assert message.startswith("1 of 2 memory tiers are not fully pinned. ")
    assert "limit of locked memory" in message
    assert message.endswith(f"First: pod demo-engine-1: {problem}")
    assert rig.told("Degraded")[:2] == ("True", "MemoryNotPinned")
    assert rig.told("Ready")[0] == "True"
    rig.answers["10.0.0.1"] = GOOD | {"transfer": pinned}
    assert rig.told("Degraded")[0] == "False"


@pytest.mark.parametrize(
    "said",
    ["x", {"pinned_bytes": 5}, {"pinned_bytes": {"engine": "x"}}, {"pinned_bytes": {"engine": -1}},
     {"pin_problem": ["x"]}],
)  # fmt: skip
def test_pins_are_read_with_suspicion(said: Any) -> None:
    assert Rig(GOOD | {"transfer": said}).told("MemoryTierPinned") == ("", "", "")


@pytest.mark.parametrize(
    ("lookups", "told"),
    [
        ({"lookup_tokens": 1000, "hit_tokens": {"engine": 100, "memory": 250, "x": 3}}, (10, 25)),
        ({"lookup_tokens": 1000, "hit_tokens": {"engine": -1, "memory": 2**70}}, (0, 0)),
        ({"lookup_tokens": 1000, "hit_tokens": [7]}, (0, 0)),
        ({"lookup_tokens": "many", "hit_tokens": {"engine": 1}}, None),
        ([], None),
    ],
)
def test_hits_are_read_with_suspicion(lookups: Any, told: tuple[int, int] | None) -> None:
    rig = Rig(GOOD | {"lookups": lookups})
    rig.told()
    hits = told and {"engine": told[0], "memory": told[1]}
    assert rig.world.resource["status"].get("hitPercent") == hits


def test_what_they_say_is_cut_and_cleaned() -> None:
    reason = "no\x00 \x1b[31mred\u202e\ud800\r\n" + "x" * 5000
    rig = Rig(GOOD | {"is_ready": False, "not_ready_reason": reason})
    message = rig.told()[2]
    assert "pod demo-engine-0: no [31mred xxx" in message
    assert message.isprintable()
    assert len(message) < 700


def test_one_answer_that_does_not_come_is_no_news() -> None:
    rig = Rig(GOOD)
    before = rig.told(), rig.world.resource["status"]
    rig.answers["10.0.0.0"] = None
    assert (rig.told(), rig.world.resource["status"]) == before
    rig.now = 50  # who is silent is left alone for a while
    rig.told()
    assert len(rig.asked) == 2
    rig.now = 100
    assert rig.told()[:2] == ("Unknown", "NoAnswer")
    rig.now, rig.answers["10.0.0.0"] = 200, GOOD
    assert rig.told()[0] == "True"


def test_after_a_restart_one_missing_answer_changes_nothing() -> None:
    rig = Rig(BAD)
    before = rig.told()
    rig.prober = SidecarProber(rig.prober.read_stats, rig.prober.monotonic)
    rig.answers["10.0.0.0"] = None
    assert rig.told() == before
    assert rig.told("Degraded")[0] == "True"


def test_what_was_not_asked_stays_as_it_was_told() -> None:
    rig = Rig(BAD)
    before = rig.told()
    rig.world.resource["status"] = status_of(rig.world, probed=None)
    assert before[2] in str(rig.world.resource["status"])
    assert "SidecarAttached" not in str(status_of(settled_world(), probed=None))


def test_one_that_misses_an_answer_hides_no_other() -> None:
    rig = Rig(GOOD, GOOD)
    assert rig.told()[0] == "True"
    rig.answers |= {"10.0.0.0": None, "10.0.0.1": BAD}
    assert rig.told()[:2] == ("False", "SidecarNotReady")


def test_figures_in_a_reason_are_told_once() -> None:
    rig = Rig(BAD | {"not_ready_reason": "17.5 MiB free of 20"})
    before = rig.told()
    rig.answers["10.0.0.0"] = BAD | {"not_ready_reason": "3 MiB free of 20"}
    assert rig.told() == before
    rig.answers["10.0.0.0"] = BAD | {"not_ready_reason": "3 GiB free of 20"}
    assert "3 GiB" in rig.told()[2]


def test_few_are_asked_at_once_and_the_others_are_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 40 sidecars all but four hang: what could not be asked in time is asked first at the next look."""
    monkeypatch.setattr("lmcache_operator.reconcile.probe._PROBE_SECONDS", 0.05)
    rig = Rig(*[GOOD] * 40)
    running, most, done = 0, 0, set()

    async def ask(address: str) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if len(done) < 4 or address in done:
                done.add(address)
                return GOOD
            await asyncio.Event().wait()
        finally:
            running -= 1

    rig.prober = SidecarProber(ask, lambda: rig.now)
    probed = rig.probe()
    assert most == 16
    assert sum(sidecar.answers for sidecar in probed.sidecars) == 4
    assert running == 0


# -- over HTTP

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def read_from(*pieces: bytes, seconds: float = 0.0, is_listening: bool = True, patience: float = 60.0) -> Any:
    """What is read from a server that answers these bytes after a while."""

    async def run() -> Any:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(seconds)
            for piece in pieces:
                writer.write(piece)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        if not is_listening:
            server.close()
        async with StatsClient(port, seconds=patience) as stats:
            found = await stats.read("127.0.0.1")
        server.close()
        return found

    return asyncio.run(run())


def answer_of(body: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)


def test_stats_are_read_over_http() -> None:
    assert read_from(answer_of(json.dumps(GOOD).encode())) == GOOD


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\x00\xff\r\n\r\n",
        b"HTTP/1.1 500 Oh\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 2\r\n\r\n{}",
        answer_of(b'{"is_ready": '),
        answer_of(b"\xff\xfe"),
        answer_of(b"[" * 100000 + b"]" * 100000),
        answer_of(b"[" * 2000 + b'"' + b'\\"' * 100000),
        answer_of(gzip.compress(b"{}", mtime=0), b"Content-Encoding: gzip\r\n"),
        answer_of(b'"' + b"x" * (1 << 20) + b'"'),
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100000,
    ],
)
def test_what_is_no_answer_is_none(answer: bytes) -> None:
    assert read_from(answer) is None


def test_nobody_waits_for_who_does_not_answer() -> None:
    assert read_from(is_listening=False) is None
    assert read_from(answer_of(b"{}"), seconds=60, patience=0.05) is None


def test_an_odd_address_is_no_answer() -> None:
    async def run(address: str) -> Any:
        async with StatsClient() as stats:
            return await stats.read(address)

    for address in ("", "a b", "::1:x", "300.0.0.1", "h/../x"):
        assert asyncio.run(run(address)) is None
