"""A group of parts in virtual time, with simulated links and vLLMs."""

from __future__ import annotations

import signal
from collections import deque

from lmcache_client.group.channel import PartIdentity
from lmcache_client.group.part import (
    ABORT_SECONDS,
    BEAT_SECONDS,
    KILL_SECONDS,
    SILENCE_SECONDS,
    Action,
    Disconnect,
    Exit,
    GroupPart,
    Kill,
    LogLine,
    Phase,
    SendMessage,
    Start,
    Withdraw,
)

NOTICE_SECONDS, DRAIN_SECONDS = 4.0, 20.0
LOSS_BOUND = SILENCE_SECONDS + ABORT_SECONDS + KILL_SECONDS + 4 * BEAT_SECONDS
"""Time from a loss until no vLLM of the group runs. It includes a tick of each of two parts and of kill."""
DRAIN_BOUND = NOTICE_SECONDS + DRAIN_SECONDS + LOSS_BOUND
HANGS = 1e9


class Pod:
    """One launcher of a rank, from its start to its exit, with a simulated vLLM."""

    def __init__(self, rank: int, nodes: int, has_one_server: bool = False) -> None:
        self.rank, self.is_leader = rank, rank == 0
        self.is_headless = has_one_server and rank > 0
        identity = PartIdentity(rank, nodes, "r1", f"pod-{rank}")
        timing = NOTICE_SECONDS, DRAIN_SECONDS, self.is_headless
        self.part = GroupPart(identity, f"10.0.0.{rank}", *timing)
        self.links: dict[int, Wire] = {}
        self.group: Incarnation | None = None
        self.ends_at: float | None = None
        """Time at which vLLM exits by itself after a signal."""
        self.is_open = False
        """Whether the port of the readiness probe is open."""
        self.exit: Exit | None = None
        self.log: list[str] = []

    @property
    def is_running(self) -> bool:
        return self.group is not None and self.exit is None


class Wire:
    """A connection between the leader and a follower: ordered, and silent while it is cut."""

    def __init__(self, leader: Pod, follower: Pod) -> None:
        self.ends = (leader, follower)
        self.queues: dict[Pod, deque[str]] = {leader: deque(), follower: deque()}  # by receiver
        self.is_closed = False

    def other(self, pod: Pod) -> Pod:
        return self.ends[self.ends[0] is pod]


class Incarnation:
    """All parts that one leader started together."""

    def __init__(self, pods: list[Pod]) -> None:
        self.pods = pods
        self.broken_since: float | None = None
        self.drained_since: float | None = None
        self.was_silent = False
        """Whether any part has been silent."""


class Simulation:
    """A group whose containers restart at once, as by a kubelet, in virtual time."""

    def __init__(self, nodes: int, has_one_server: bool = False) -> None:
        """``has_one_server``: vLLM is headless in all pods but the leader's, and exits at once on SIGTERM."""
        self.now, self.nodes, self.has_one_server = 1.0, nodes, has_one_server
        self.cut: dict[int, float] = {}
        """Followers whose network is down, with the time since when."""
        self.frozen: set[int] = set()
        """Ranks whose launchers do not run."""
        self.pods = [Pod(rank, nodes, has_one_server) for rank in range(nodes)]
        self.exits: list[tuple[int, Exit]] = []
        self.signals: list[tuple[int, signal.Signals]] = []
        self.lifetime = 0.0
        """Seconds from SIGTERM to the exit of a vLLM. With ``HANGS`` it ignores SIGKILL, too."""
        self.incarnations: list[Incarnation] = []

    def run(self, pod: Pod, actions: list[Action]) -> None:
        for action in actions:
            assert pod.exit is None
            match action:
                case SendMessage(rank, text):
                    wire = pod.links[rank]
                    wire.queues[wire.other(pod)].append(text)
                case Disconnect(rank):
                    pod.links.pop(rank).is_closed = True
                case Start(address):
                    assert address == "10.0.0.0"
                    self.start(pod)
                    pod.is_open = True
                case Withdraw():
                    pod.is_open = False
                case Kill(number) if pod.is_running:
                    self.signals.append((pod.rank, number))
                    self.check_notice(pod, number)
                    is_killed = number is signal.SIGKILL and self.lifetime < HANGS
                    is_at_once = is_killed or (pod.is_headless and self.lifetime < HANGS)
                    pod.ends_at = min(self.now + (0.0 if is_at_once else self.lifetime), pod.ends_at or HANGS)
                case LogLine(text):
                    pod.log.append(text)
                case Exit():
                    self.end(pod, action)

    def start(self, pod: Pod) -> None:
        assert not pod.is_running
        if pod.is_leader:
            followers = [pod.links[rank].other(pod) for rank in range(1, self.nodes)]
            assert [each.rank for each in followers] == [*range(1, self.nodes)]
            pod.group = Incarnation([pod, *followers])
            self.incarnations.append(pod.group)
            if any(each.exit or pod.links[each.rank].is_closed for each in followers):
                pod.group.broken_since = self.now
        else:
            leader = pod.links[0].other(pod)
            assert leader.group, "a follower starts after its leader"
            pod.group = leader.group
            assert pod in pod.group.pods, "a follower starts only with the leader that it is linked to"

    def end(self, pod: Pod, how: Exit) -> None:
        """End a launcher: its links close."""
        pod.exit = how
        self.exits.append((pod.rank, how))
        for wire in pod.links.values():
            wire.is_closed = True
        pod.links.clear()
        for incarnation in self.incarnations:
            if pod in incarnation.pods and incarnation.broken_since is None:
                incarnation.broken_since = self.now

    def restart_containers(self) -> None:
        for rank, pod in enumerate(self.pods):
            if pod.exit:
                self.pods[rank] = Pod(rank, self.nodes, self.has_one_server)
        leader = self.pods[0]
        for pod in self.pods[1:]:
            if pod.part.phase is Phase.GATHERING and not pod.links and pod.rank not in self.cut:
                self.connect(leader, pod)

    def connect(self, leader: Pod, pod: Pod) -> None:
        if leader.part.refusal(PartIdentity(pod.rank, self.nodes, "r1", "x")):
            return
        wire = Wire(leader, pod)
        leader.links[pod.rank] = pod.links[0] = wire
        self.run(pod, pod.part.joined(0, "pod-0", self.now))
        self.run(leader, leader.part.joined(pod.rank, f"pod-{pod.rank}", self.now))

    def deliver(self) -> None:
        """Deliver what was sent, and then the end of closed links, on all links that work."""
        for pod in [pod for pod in self.pods if pod.rank not in self.frozen]:
            for rank, wire in list(pod.links.items()):
                if wire.ends[1].rank in self.cut:
                    continue
                while wire.queues[pod] and pod.exit is None and pod.links.get(rank) is wire:
                    self.run(pod, pod.part.received(rank, wire.queues[pod].popleft(), self.now))
                if wire.is_closed and pod.exit is None and pod.links.get(rank) is wire:
                    del pod.links[rank]
                    self.run(pod, pod.part.lost(rank, "closed its link", self.now))

    def end_engines(self) -> None:
        for pod in self.pods:
            if pod.is_running and pod.ends_at is not None and self.now >= pod.ends_at:
                self.run(pod, pod.part.exited(-signal.SIGTERM))

    def settle(self) -> None:
        for _ in range(4):  # a follower's news reach the leader, and then all others
            self.deliver()
            self.end_engines()
            self.restart_containers()

    def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / BEAT_SECONDS)):
            self.now += BEAT_SECONDS
            for incarnation in self.incarnations:
                incarnation.was_silent |= bool(self.cut or self.frozen)
            for pod in self.pods:
                if pod.exit is None and pod.rank not in self.frozen:
                    self.run(pod, pod.part.tick(self.now))
            self.settle()
            self.check_bounds()

    def terminate(self, pod: Pod) -> None:
        if pod.group and pod.group.drained_since is None:
            pod.group.drained_since = self.now
        self.run(pod, pod.part.terminated(self.now))

    def check_notice(self, pod: Pod, number: signal.Signals) -> None:
        """While all parts run, SIGTERM follows only after the time in which clients notice the drain."""
        group = pod.group
        if number is signal.SIGTERM and group.broken_since is None and not group.was_silent:
            assert self.now - group.drained_since >= NOTICE_SECONDS
            assert not pod.is_headless or group.pods[0].exit, "the leader's vLLM still needs this one"

    def check_bounds(self) -> None:
        """After a loss, all of the group end within the bound, even if a vLLM ignores signals.

        Without a partition, all ports are closed as soon as a drain has begun or a part is lost.
        """
        for pod in self.pods:
            if not pod.is_running:
                continue
            has_begun = pod.group.drained_since is not None or pod.group.broken_since is not None
            assert not (pod.is_open and has_begun) or self.cut or self.frozen
            if pod.group.drained_since is not None:
                assert self.now - pod.group.drained_since <= DRAIN_BOUND
            else:
                losses = [*self.cut.values(), *filter(None, [pod.group.broken_since])]
                assert self.now - min(losses, default=self.now) <= LOSS_BOUND
