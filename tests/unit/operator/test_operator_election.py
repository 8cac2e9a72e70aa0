"""Leader election: several operators, one Lease, and an API server that is slow and loses answers."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_operator import election, metrics
from lmcache_operator.election import LEASE_SECONDS, Elector, LeaseName, new_identity
from lmcache_operator.errors import LeaseLostError, UnavailableError
from lmcache_operator.kube.client import KubeApi
from tests.harness.jumping_loop import now, run
from tests.harness.operator.leases import Connection, LeaseServer, troubles
from tests.harness.scope import examples

NAME = LeaseName("system", "operator")
TAKEOVER_SECONDS = 18
"""Maximum time from the last renewal to a takeover: 15 s and two polls."""


def elector(server: LeaseServer | Connection, pod: str, clock: Callable[[], float] = now) -> Elector:
    connection = Connection({NAME: server}) if isinstance(server, LeaseServer) else server
    return Elector(cast(KubeApi, connection), NAME, new_identity(pod), clock=clock)


class Process:
    """An operator that is restarted whenever it ends."""

    def __init__(self, server: LeaseServer, number: int) -> None:
        self.connection, self.number, self.num_starts = Connection({NAME: server}), number, 0
        self.ended = asyncio.Event()
        """Set when the operator receives SIGTERM."""
        self.elector = self._new_elector()
        self.task = asyncio.create_task(self._run())

    def _new_elector(self) -> Elector:  # all clocks differ
        return elector(self.connection, f"pod-{self.number}", lambda: now() + 1000.0 * self.number)

    async def _run(self) -> None:
        while True:
            self.num_starts += 1
            with contextlib.suppress(LeaseLostError):
                await self.elector.lead(self._work)
            self.ended.clear()
            self.elector = self._new_elector()

    async def _work(self) -> None:
        await self.ended.wait()


def leading_metric() -> float:
    """Value of the metric. All operators of a test share this process and its metric."""
    return next(iter(metrics.LEADING.collect())).samples[0].value


def leading(processes: list[Process]) -> list[Process]:
    return [process for process in processes if process.elector.seconds_left() > 0]


async def wait_for_leader(processes: list[Process], seconds: float) -> Process:
    deadline = now() + seconds
    while not (leaders := leading(processes)):
        assert now() < deadline, f"no operator leads after {seconds} s"
        await asyncio.sleep(0.05)
    (leader,) = leaders
    return leader


def scenario(num: int) -> Callable[[Any], Callable[[], None]]:
    """Decorate a test that gets this many operators. They are killed at its end."""

    def decorate(test: Any) -> Callable[[], None]:
        async def body() -> None:
            server = LeaseServer()
            processes = [Process(server, number) for number in range(num)]
            await test(server, processes)
            for process in processes:
                process.task.cancel()

        return lambda: run(body())

    return decorate


STEPS = ("ok", "slow", "lossy", "freeze", "kill", "stop", "delete", "unhold", "foreign", "empty", "brief")
"""Events of a random run. The last five are edits of the Lease by hand."""


@settings(max_examples=examples(80))
@given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2), st.floats(0, 30)), max_size=12),
    st.integers(0, 2**32).map(Random),
    st.sampled_from([5.0, 1000.0]),
)
def test_at_most_one_operator_leads_and_finally_one_leads(steps, random, try_seconds):
    """Network faults, frozen processes and edits by hand occur. A frozen process has no timeouts either."""

    async def body() -> None:
        server = LeaseServer()
        processes = [Process(server, number) for number in range(3)]

        async def watch_leaders() -> None:
            while True:
                assert len(leading(processes)) <= 1
                await asyncio.sleep(0.25)

        watch_task = asyncio.create_task(watch_leaders())
        for step, number, seconds in steps:
            _apply_step(step, server, processes[number], random)
            await asyncio.sleep(seconds)
        for process in processes:
            process.connection.trouble = lambda: 0.0
        # A call that hangs ends after 60 s in this test.
        await wait_for_leader(processes, 60 + 2 * TAKEOVER_SECONDS)
        watch_task.cancel()
        await asyncio.gather(watch_task, return_exceptions=True)
        assert watch_task.cancelled(), watch_task.exception()
        for process in processes:
            assert not process.task.done(), process.task
            process.task.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(election, "_TRY_SECONDS", try_seconds)
        run(body())


def _apply_step(step: str, server: LeaseServer, process: Process, random: Random) -> None:
    edits: dict[str, Callable[[], object]] = {
        "stop": process.ended.set,
        "delete": lambda: server.put(None),
        # A Lease without a holder that lasts 1 s would look like a released Lease.
        "unhold": lambda: server.edit(holderIdentity=None, leaseDurationSeconds=15),
        "foreign": lambda: server.edit(holderIdentity="another program"),
        "empty": lambda: server.lease and server.put(server.lease | {"spec": {}}),
        "brief": lambda: server.edit(holderIdentity="another program", leaseDurationSeconds=1),
    }
    if trouble := troubles(random).get(step):
        process.connection.trouble = trouble
    else:
        edits[step]()


@scenario(2)
async def test_standby_takes_over_within_18_s_of_a_crash(server: LeaseServer, both: list[Process]) -> None:
    leader = await wait_for_leader(both, TAKEOVER_SECONDS)
    (standby,) = {*both} - {leader}
    leader.connection.trouble = lambda: 10_000.0
    assert await wait_for_leader([standby], TAKEOVER_SECONDS) is standby
    assert leading(both) == [standby]


@scenario(2)
async def test_ending_leader_releases_the_lease_at_once(server: LeaseServer, both: list[Process]) -> None:
    leader = await wait_for_leader(both, TAKEOVER_SECONDS)
    await asyncio.sleep(30)
    leader.ended.set()
    await asyncio.sleep(3)
    assert (leader.num_starts, len(leading(both))) == (2, 1)


def late_answers(seconds: float) -> Callable[[], float]:
    """Trouble that delays only answers, not calls."""
    delays = itertools.cycle([0.0, seconds])
    return lambda: next(delays)


@scenario(2)
async def test_leader_that_releases_the_lease_does_not_write_before_the_answer(server, both):
    leader = await wait_for_leader(both, TAKEOVER_SECONDS)
    await asyncio.sleep(1)
    leader.connection.trouble = late_answers(4)
    leader.ended.set()
    await asyncio.sleep(3)
    assert (leader.num_starts, len(leading(both))) == (1, 1)
    assert leader not in leading(both)


def test_thawed_process_may_not_write_with_an_old_renewal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def thaw(server: LeaseServer, both: list[Process]) -> None:
        leader = await wait_for_leader(both, TAKEOVER_SECONDS)
        leader.connection.trouble = late_answers(40)
        for _ in range(100):
            await asyncio.sleep(0.5)
            assert len(leading(both)) <= 1
        assert leader not in leading(both)

    monkeypatch.setattr(election, "_TRY_SECONDS", 1000.0)  # no timeout fires before the answer is read
    scenario(2)(thaw)()


@scenario(1)
async def test_first_operator_waits_until_a_deleted_lease_has_expired(server, processes):
    await asyncio.sleep(LEASE_SECONDS - 0.1)
    assert not leading(processes)
    await wait_for_leader(processes, 3)


@scenario(2)
async def test_api_server_outage_ends_no_operator(server: LeaseServer, both: list[Process]) -> None:
    """A renewal after the outage proves that no other operator led.

    Without a renewal the leader may not write.
    """
    leader = await wait_for_leader(both, TAKEOVER_SECONDS)
    assert leading_metric() == 1
    for process in both:
        process.connection.trouble = lambda: -1.0
    await asyncio.sleep(60)
    assert (leading_metric(), leading(both)) == (0, [])
    leader.connection.trouble = lambda: 0.0
    assert await wait_for_leader(both, 5) is leader
    assert leader.num_starts == 1


@scenario(2)
async def test_operator_leads_when_the_namespace_of_its_lease_returns(server, both):
    """The old Lease is gone with the namespace. No operator writes before an unseen holder's time ends."""
    await wait_for_leader(both, TAKEOVER_SECONDS)
    for process in both:
        process.connection.trouble = lambda: -1.0
    server.put(None)
    await asyncio.sleep(60)
    assert leading(both) == []
    for process in both:
        process.connection.trouble = lambda: 0.0
    await asyncio.sleep(LEASE_SECONDS - 0.1)
    assert leading(both) == []
    await wait_for_leader(both, 5)


def test_work_ends_before_the_next_leader_starts_and_its_error_is_raised() -> None:
    async def body() -> None:
        server, ended = LeaseServer(), asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.sleep(10_000)
            finally:
                await asyncio.sleep(0.5)
                ended.set()

        async def broken() -> None:
            raise UnavailableError("watch", "expired")

        first, second = (elector(server, pod) for pod in ("one", "other"))
        task = asyncio.create_task(first.lead(work))
        await asyncio.sleep(20)
        server.edit(holderIdentity="other")
        with pytest.raises(LeaseLostError, match="held by other"):
            await task
        assert ended.is_set()
        with pytest.raises(UnavailableError, match="expired"):
            await second.lead(broken)
        assert server.holder == "None"

    run(body())


@scenario(2)
async def test_leader_recreates_a_deleted_lease(server: LeaseServer, both: list[Process]) -> None:
    leader = await wait_for_leader(both, TAKEOVER_SECONDS)
    for seconds in (0, 0.5, 1, 1.5, 2, 20):  # also before the other operator has read it
        server.put(None)
        await asyncio.sleep(seconds)
        assert leading(both) == [leader]
    await asyncio.sleep(60)
    assert leading(both) == [leader]
    assert (leader.num_starts, server.holder) == (1, leader.elector.identity)


@scenario(2)
async def test_lease_with_invalid_edits_is_repaired(server: LeaseServer, both: list[Process]) -> None:
    await wait_for_leader(both, TAKEOVER_SECONDS)
    assert server.lease is not None
    server.put(server.lease | {"spec": {"leaseTransitions": 2**31 - 1, "leaseDurationSeconds": 9999}})
    leader = await wait_for_leader(both, 40)
    await asyncio.sleep(20)
    spec = server.lease["spec"]
    assert server.holder == leader.elector.identity
    assert (spec["leaseDurationSeconds"], spec["leaseTransitions"]) == (15, 2**31 - 1)
    assert spec["renewTime"] > spec["acquireTime"]
