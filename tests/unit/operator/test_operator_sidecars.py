"""Statistics of sidecars: validation of their answers, the conditions from them, and limits of polling."""

import asyncio
import contextlib
import gzip
import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from lmcache_operator.reconcile.probe import SidecarProber
from lmcache_operator.stats import StatsClient
from testing.child_process import free_port
from tests.harness import jumping_loop
from tests.harness.operator.components import ReconciledCluster

GOOD = {"is_ready": True, "not_ready_reason": "", "num_clients": {"attached": 2}, "remote": None}
BAD = GOOD | {"is_ready": False, "not_ready_reason": "--remote-url: no such scheme"}
POD = "demo-engine-0"


class Rig(ReconciledCluster):
    """Running engine pods, whose sidecars answer with these statistics."""

    def __init__(self, *answers: Any) -> None:
        super().__init__(engine={"replicas": len(answers)})
        self.settle()
        self.answer(*answers)

    def polled(self, kind: str = "SidecarAttached") -> tuple[str, str, str]:
        """Status, reason and message of a condition after another poll."""
        self.run()
        status, reason = self.condition(kind)
        return status, reason, self.message(kind) if status else ""


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([GOOD, GOOD], ("True", "Attached", "2 of 2 engine pods use their sidecars.")),
        (
            [GOOD, BAD],
            (
                "False", "SidecarNotReady",
                "1 of 2 sidecars are not ready. First: pod demo-engine-1: --remote-url: no such scheme.",
            ),
        ),
        ([None, BAD], ("False", "SidecarNotReady", None)),
        ([GOOD, None], ("Unknown", "NoAnswer", None)),
        ([GOOD, GOOD | {"num_clients": {"attached": 0}}], ("False", "EngineNotAttached", None)),
        (
            [GOOD, GOOD | {"attach_refusal": "the scheduler is refused: stop those engines"}],
            (
                "False", "EngineNotAttached",
                "1 of 2 engine pods serve without their cache. First: pod demo-engine-1: the scheduler is"
                " refused: stop those engines. See the log of this pod.",
            ),
        ),
        ([GOOD | {"is_ready": False, "not_ready_reason": [1]}], ("False", "SidecarNotReady", None)),
        ([GOOD, []], ("Unknown", "NoAnswer", None)),
        ([{"num_clients": 3, "remote": "x", "is_ready": True}], ("False", "EngineNotAttached", None)),
        ([{"num_clients": {"attached": "x"}, "is_ready": "x"}], ("False", "SidecarNotReady", None)),
    ],
)  # fmt: skip
def test_sidecar_answers_become_conditions(answers: list[Any], expected: tuple[str, str, str | None]) -> None:
    rig = Rig(*answers)
    status, reason, message = rig.polled()
    assert (status, reason, message if expected[2] else None) == expected
    is_false = status == "False"
    assert rig.condition("Degraded") == (str(is_false), reason if is_false else "AsDeclared")
    assert (rig.condition("Ready"), rig.condition("EngineAvailable")[0]) == (("True", "Ready"), "True")


def test_condition_is_unknown_before_an_engine_runs() -> None:
    rig = Rig(GOOD | {"num_clients": {"attached": 0}})
    status = rig.world.pods[POD]["status"]
    status["conditions"] = [{"type": "Ready", "status": "False"}]
    assert rig.polled()[:2] == ("Unknown", "NoEngine")
    status["phase"] = "Pending"
    assert (rig.polled()[:2], rig.world.num_stats_reads) == (("Unknown", "NoEngine"), 1)


PINNED = {"pinned_bytes": {"engine": 1 << 30, "reader": 0}, "pin_problem": ""}
UNPINNED = "the worker of column 0, pid 7, could not pin 3 parts of the memory tier: OUT_OF_MEMORY (2)"
PARTS = {
    "RemoteTierReachable": (
        {"remote": {"is_reachable": True}},
        {"remote": {"is_reachable": False, "off_reason": "NOAUTH was the answer to AUTH"}},
        ("True", "Reachable", "1 of 2 sidecars can reach the remote tier."),
        "RemoteTierUnreachable",
        "1 of 2 sidecars cannot reach the remote tier. First: pod demo-engine-1: "
        "NOAUTH was the answer to AUTH.",
    ),
    "DiskTierAvailable": (
        {"disk": {"is_reachable": True, "off_reason": ""}},
        {"disk": {"is_reachable": False, "off_reason": "[Errno 30] Read-only file system"}},
        ("True", "Available", "All 1 disk tiers are in use."),
        "DiskTierOff",
        "1 of 2 disk tiers are off. First: pod demo-engine-1: [Errno 30] Read-only file system.",
    ),
    "MemoryTierPinned": (
        {"transfer": PINNED},
        {"transfer": {"pin_problem": UNPINNED}},
        ("True", "Pinned", "The memory tiers of all 1 GPU pods are pinned."),
        "MemoryNotPinned",
        "1 of 2 memory tiers are not fully pinned, so copies between them and the GPU are slow. "
        f"First: pod demo-engine-1: {UNPINNED}.",
    ),
    "KVShared": (
        {"private_reason": "", "disk": {}, "remote": {"is_reachable": True}},
        {"private_reason": "block hashes have a random seed", "remote": {"is_reachable": True}},
        ("True", "Shared", "Lower tiers can hold the KV of all 1 engine pods."),
        "KVPrivate",
        "1 of 2 engine pods share no KV, so only their own memory holds it. First: pod demo-engine-1: "
        "block hashes have a random seed.",
    ),
}


@pytest.mark.parametrize("kind", PARTS)
def test_part_that_fails_degrades_a_cluster_that_serves(kind):
    good, bad, expected, reason, message = PARTS[kind]
    rig = Rig(GOOD, GOOD)
    assert rig.polled(kind) == ("", "", "")
    rig.answer(GOOD | good)
    assert rig.polled(kind) == expected
    rig.answer(GOOD | good, GOOD | bad)
    status, polled_reason, text = rig.polled(kind)
    assert (status, polled_reason, text.endswith(message)) == ("False", reason, True)
    assert (rig.condition("Degraded"), rig.condition("Ready")[0]) == (("True", reason), "True")
    rig.answer(GOOD | good, GOOD | good)
    assert rig.polled("Degraded")[0] == "False"


@pytest.mark.parametrize(
    ("host", "remedy"),
    [
        ("kvv.cache.svc", ": kubectl get service -n cache lists the Services"),
        ("kvv", ": kubectl get service -n team lists the Services"),
        ("kvv.cache.example.com", ""),
        (None, None),
    ],
)
def test_host_without_an_address_is_named(host: str | None, remedy: str | None) -> None:
    """A managed tier has no address until its first pod runs, so that its user need not check the host."""
    why = f"remote tier {host or 'demo-remote.team.svc'}:6379: cannot resolve the host: unknown"
    rig = Rig(GOOD | {"remote": {"is_reachable": False, "off_reason": why}})
    rig.world.change(
        tiers={"remote": {"external": {"url": f"redis://{host}:6379"}} if host else {"managed": {}}}
    )
    _, _, message = rig.polled("RemoteTierReachable")
    sentences = [f"First: pod demo-engine-0: {why}."]
    sentences += [f"Check the host in spec.tiers.remote.external.url{remedy}."] if host else []
    assert message.endswith(f"the remote tier. {' '.join(sentences)}")


@pytest.mark.parametrize(
    "transfer",
    ["x", {"pinned_bytes": 5}, {"pinned_bytes": {"engine": "x"}}, {"pinned_bytes": {"engine": -1}},
     {"pin_problem": ["x"]}],
)  # fmt: skip
def test_invalid_pin_statistics_are_ignored(transfer: Any) -> None:
    assert Rig(GOOD | {"transfer": transfer}).polled("MemoryTierPinned") == ("", "", "")


@pytest.mark.parametrize(
    "part",
    [{"private_reason": "x"}, {"private_reason": "x", "disk": {}},
     *({"private_reason": reason, "remote": {"is_reachable": True}} for reason in (None, ["x"]))],
)  # fmt: skip
def test_private_kv_is_no_problem_without_a_lower_tier_or_an_engine(part: Any) -> None:
    assert Rig(GOOD | part).polled("KVShared") == ("", "", "")


@pytest.mark.parametrize(
    ("lookups", "expected"),
    [
        ({"lookup_tokens": 1000, "hit_tokens": {"engine": 100, "memory": 250, "x": 3}}, (10, 25)),
        ({"lookup_tokens": 1000, "hit_tokens": {"engine": -1, "memory": 2**70}}, (0, 0)),
        ({"lookup_tokens": 1000, "hit_tokens": [7]}, (0, 0)),
        ({"lookup_tokens": "many", "hit_tokens": {"engine": 1}}, None),
        ([], None),
    ],
)
def test_invalid_hit_statistics_are_limited_or_ignored(lookups, expected):
    rig = Rig(GOOD | {"lookups": lookups})
    rig.run()
    hits = expected and {"engine": expected[0], "memory": expected[1]}
    assert rig.world.resource["status"].get("hitPercent") == hits


def test_sidecar_texts_are_shortened_and_sanitized() -> None:
    reason = "no\x00 \x1b[31mred\u202e\ud800\r\n" + "x" * 5000
    message = Rig(GOOD | {"is_ready": False, "not_ready_reason": reason}).polled()[2]
    assert "pod demo-engine-0: no [31mred xxx" in message
    assert message.isprintable()
    assert len(message) < 700


def test_single_missing_answer_does_not_change_the_status() -> None:
    rig = Rig(GOOD)
    before = rig.polled(), rig.world.resource["status"]
    rig.world.stats.clear()
    assert (rig.polled(), rig.world.resource["status"]) == before
    rig.seconds = 50  # a silent sidecar is polled after a pause
    rig.run()
    assert rig.world.num_stats_reads == 2
    rig.seconds = 100
    assert rig.polled()[:2] == ("Unknown", "NoAnswer")
    rig.seconds = 200
    rig.answer(GOOD)
    assert rig.polled()[0] == "True"


def test_missing_answer_after_a_restart_keeps_the_status() -> None:
    rig = Rig(BAD)
    before = rig.polled()
    rig.restart_operator()
    rig.world.stats.clear()
    assert (rig.polled(), rig.condition("Degraded")[0]) == (before, "True")


def test_changed_number_in_a_reason_does_not_change_the_condition() -> None:
    rig = Rig(BAD | {"not_ready_reason": "17.5 MiB free of 20"})
    before = rig.polled()
    rig.answer(BAD | {"not_ready_reason": "3 MiB free of 20"})
    assert rig.polled() == before
    rig.answer(BAD | {"not_ready_reason": "3 GiB free of 20"})
    assert "3 GiB" in rig.polled()[2]


def test_prober_limits_concurrency_and_continues_with_the_rest() -> None:
    """All but four of 40 sidecars hang.

    The next poll starts with the sidecars that were not polled in time.
    """
    running, max_running, answered = 0, 0, set()

    async def ask(address: str) -> Any:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        try:
            if len(answered) < 4 or address in answered:
                answered.add(address)
                return GOOD
            await asyncio.Event().wait()
        finally:
            running -= 1

    pods = tuple(Rig(*[GOOD] * 40).world.pods.values())
    probed = jumping_loop.run(SidecarProber(ask, lambda: 0.0).probe(pods))
    assert (max_running, running) == (16, 0)
    assert sum(sidecar.answers for sidecar in probed.sidecars) == 4


# -- over HTTP


@contextlib.asynccontextmanager
async def serving(*pieces: bytes, heads: list[str], host: str = "127.0.0.1") -> AsyncIterator[int]:
    """The port of a server that sends these bytes, or never answers if there are none. Keeps the requests."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        if not pieces:
            await reader.read()  # until the client gives up
        for piece in pieces:
            writer.write(piece)
        writer.close()

    async with await asyncio.start_server(answer, host, 0) as server:
        yield server.sockets[0].getsockname()[1]


def read_from(*pieces: bytes, timeout_seconds: float = 60.0) -> Any:
    """Result of reading from such a server."""

    async def run() -> Any:
        async with serving(*pieces, heads=[]) as port, StatsClient(port, seconds=timeout_seconds) as stats:
            return await stats.read("127.0.0.1", "uid")

    return asyncio.run(run())


def answer_of(body: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%sContent-Length: %d\r\n\r\n%s" % (head, len(body), body)


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
def test_stats_client_returns_none_for_an_invalid_response(answer: bytes) -> None:
    assert read_from(answer) is None


def test_stats_client_returns_none_after_the_timeout() -> None:
    assert read_from(timeout_seconds=0.05) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_stats_client_sends_each_cluster_a_token_of_its_own(host: str) -> None:
    heads = list[str]()

    async def run() -> None:
        async with serving(answer_of(json.dumps(GOOD).encode()), heads=heads, host=host) as port:
            for key in (b"", b"key", b"other"):
                async with StatsClient(port, key=key) as stats:
                    for uid in ("1", "2"):
                        assert await stats.read(host, uid) == GOOD

    asyncio.run(run())
    none, also_none, *sent = ([*re.findall(r"Authorization: Bearer (.*)\r\n", head)] for head in heads)
    assert none == also_none == []
    assert len({token for (token,) in sent}) == 4
    assert all(re.fullmatch("[0-9a-f]{64}", token) for (token,) in sent)


def test_stats_client_returns_none_for_an_address_without_server() -> None:
    async def run(address: str) -> Any:
        async with StatsClient(free_port()) as stats:
            return await stats.read(address, "uid")

    for address in ("", "a b", "::1:x", "300.0.0.1", "h/../x", "127.0.0.1"):
        assert asyncio.run(run(address)) is None
