"""Decisions of one part of a group: when vLLM starts, and when and why it ends. Pure.

Each method is an event and returns actions, which the caller runs in order. Times are in seconds of one
clock. The leader is linked to all followers, and each follower to the leader, which relays causes.
"""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lmcache_client.group.channel import LEADER, PartIdentity

BEAT_SECONDS, SILENCE_SECONDS = 0.5, 5.0
ABORT_SECONDS = 5.0
"""Time for vLLM to end after the loss of a part. Its requests cannot finish."""
KILL_SECONDS = 5.0
"""Time for vLLM to end after SIGKILL. A process may be stuck in a driver."""
_REPORT_SECONDS = 30.0


class Phase(enum.Enum):
    """Life of a part, in order."""

    GATHERING = enum.auto()
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """A pod of the group terminates: vLLM serves until Services and proxies have removed all parts."""
    DRAINING = enum.auto()
    """vLLM finishes its requests on all parts."""
    ENDING = enum.auto()
    """A part is lost."""


class SendMessage(NamedTuple):
    """Send a message to a linked part."""

    rank: int
    text: str


class Disconnect(NamedTuple):
    """Close the link to a part."""

    rank: int


class Start(NamedTuple):
    """Close the port for followers, open that of the probe, and start vLLM."""

    address: str
    """IP address of the leader's pod."""


class Withdraw(NamedTuple):
    """Close the port of the readiness probe, if it is open, so that the pod gets no new requests."""


class Kill(NamedTuple):
    """Send SIGKILL to all processes of vLLM, or SIGTERM to its first process, which ends the others."""

    number: signal.Signals


class LogLine(NamedTuple):
    """Log a sentence."""

    text: str


class Exit(NamedTuple):
    """Exit with this status and this last line."""

    status: int
    cause: str


Action: TypeAlias = SendMessage | Disconnect | Start | Withdraw | Kill | LogLine | Exit


@dataclass
class _Peer:
    label: str
    last_heard: float
    has_finished: bool = False


class GroupPart:
    """State machine of one part."""

    def __init__(
        self,
        identity: PartIdentity,
        address: str,
        notice_seconds: float,
        drain_seconds: float,
        is_headless: bool = False,
    ) -> None:
        """Start in ``GATHERING``.

        Args:
            address: IP address of this pod.
            notice_seconds: time of ``LEAVING``, and ``drain_seconds`` that of ``DRAINING``.
            is_headless: vLLM computes for the leader's server here, so it ends after the leader's.
        """
        self.identity, self.phase = identity, Phase.GATHERING
        self._label = self._label_of(identity.rank, identity.name)
        self._address, self._notice_seconds, self._drain_seconds = address, notice_seconds, drain_seconds
        self._peers: dict[int, _Peer] = {}
        self._cause = self._problem = ""
        self._deadline = self._next_report = self._last_tick = 0.0
        self._is_terminated = self._is_killed = False
        self._is_headless = is_headless

    def refusal(self, follower: PartIdentity) -> str:
        """Return why a follower cannot join now, or an empty text.

        If two parts have the same rank, the older part stays, because a second pod of its name must not end
        the group. If the older part has crashed, its link soon closes or is silent, and the newer part joins.
        """
        if self.phase is not Phase.GATHERING:
            return "the group is complete"
        here, there = (f"{each.nodes} pods of revision {each.revision}" for each in (self.identity, follower))
        if here != there:
            return f"the first pod expects {here}, and this one {there}"
        is_free = LEADER < follower.rank < follower.nodes and follower.rank not in self._peers
        return "" if is_free else f"rank {follower.rank} is taken or too large"

    def joined(self, rank: int, name: str, now: float) -> list[Action]:
        """Note a new link to another part, which has proved that it knows the secret."""
        self._peers[rank] = _Peer(self._label_of(rank, name), now)
        self._problem = ""
        if self.identity.rank != LEADER or len(self._peers) < self.identity.nodes - 1:
            return []
        return [*self._broadcast(f"start {self._address}"), *self._start(self._address)]

    def failed(self, problem: str) -> None:
        """Note why a connection did not become a link. The first problem gets a line at once."""
        self._next_report = self._next_report if self._problem else 0.0
        self._problem = problem

    def received(self, rank: int, text: str, now: float) -> list[Action]:
        """Act on a message of a linked part. Every message counts as a heartbeat."""
        peer = self._peers[rank]
        peer.last_heard = now
        word, _, rest = text.partition(" ")
        if word == "finished":
            peer.has_finished = True
            return self._end_requests(now) if self._is_headless else []
        if word == "start" and self.phase is Phase.GATHERING and rank == LEADER:
            return self._start(rest)
        if word == "drain":
            return self._drain(rest, now)
        return self._end(rest, now) if word == "end" else []

    def lost(self, rank: int, reason: str, now: float) -> list[Action]:
        """Note that the link to a part has closed. ``reason``: a clause whose subject is the part."""
        peer = self._peers.pop(rank)
        return [] if peer.has_finished else self._end(f"{peer.label} {reason}", now)

    def terminated(self, now: float) -> list[Action]:
        """Act on SIGTERM: the pod is deleted, or the kubelet restarts its container."""
        cause, self._is_terminated = f"{self._label} was terminated", True
        return [Exit(0, cause)] if self.phase is Phase.GATHERING else self._drain(cause, now)

    def exited(self, status: int) -> list[Action]:
        """Note that vLLM's first process has exited, with a negative status if a signal killed it."""
        code = 128 - status if status < 0 else status
        if self.phase in (Phase.RUNNING, Phase.LEAVING) or (self.phase is Phase.DRAINING and self._is_needed):
            how = f"was killed by signal {-status}" if status < 0 else f"exited with {status}"
            cause = f"{self._label} ended: vLLM {how}"
            return [*self._broadcast(f"end {cause}"), Kill(signal.SIGKILL), Exit(code or 1, cause)]
        finished = self._broadcast("finished") if self.phase is Phase.DRAINING else []
        return [*finished, Kill(signal.SIGKILL), self._exit(code)]

    def tick(self, now: float) -> list[Action]:
        """Send heartbeats, and act on deadlines. Call it every ``BEAT_SECONDS``."""
        actions = self._broadcast("beat")
        # If this launcher did not run, all nodes may have paused. Otherwise the other parts end the group.
        paused = max(0.0, now - (self._last_tick or now) - 2 * BEAT_SECONDS)
        self._last_tick = now
        for rank, peer in [*self._peers.items()]:
            peer.last_heard = min(now, peer.last_heard + paused)
            if now - peer.last_heard > SILENCE_SECONDS:
                reason = f"was silent for {SILENCE_SECONDS:g} s"
                actions += [SendMessage(rank, f"end {peer.label} {reason}"), Disconnect(rank)]
                actions += self.lost(rank, reason, now)
        if self.phase is Phase.GATHERING and now >= self._next_report:
            self._next_report = now + _REPORT_SECONDS
            actions.append(LogLine(self._report()))
        if self.phase is Phase.LEAVING and now >= self._deadline:
            actions += self._end_requests(now)
        elif self.phase in (Phase.DRAINING, Phase.ENDING) and now >= self._deadline:
            actions.append(self._exit(1) if self._is_killed else Kill(signal.SIGKILL))
            self._is_killed, self._deadline = True, now + KILL_SECONDS
        return actions

    def _start(self, address: str) -> list[Action]:
        self.phase = Phase.RUNNING
        return [LogLine(f"{self._label} starts vLLM: all parts are connected"), Start(address)]

    def _drain(self, cause: str, now: float) -> list[Action]:
        if self.phase is not Phase.RUNNING:
            return []
        self.phase, self._cause, self._deadline = Phase.LEAVING, cause, now + self._notice_seconds
        drain = LogLine(f"{cause}, so vLLM ends on all parts after its requests")
        return [drain, *self._broadcast(f"drain {cause}"), Withdraw()]

    def _end_requests(self, now: float) -> list[Action]:
        """Drain vLLM. A headless one would exit at once, so it gets SIGTERM after the leader's has exited."""
        if self.phase is Phase.LEAVING:
            self.phase, self._deadline = Phase.DRAINING, now + self._drain_seconds
        return [] if self.phase is not Phase.DRAINING or self._is_needed else [Kill(signal.SIGTERM)]

    @property
    def _is_needed(self) -> bool:
        """Whether the leader's vLLM may still compute with this headless one."""
        leader = self._peers.get(LEADER)
        return self._is_headless and not (leader is None or leader.has_finished or self._is_killed)

    def _end(self, cause: str, now: float) -> list[Action]:
        if self.phase in (Phase.GATHERING, Phase.ENDING):
            return []
        # A headless vLLM may not have SIGTERM yet, and ignores a second one.
        has_signal = self.phase is Phase.DRAINING and not self._is_headless
        terminate: list[Action] = [] if has_signal else [Withdraw(), Kill(signal.SIGTERM)]
        self.phase, self._cause = Phase.ENDING, cause
        self._deadline = now + (KILL_SECONDS if self._is_killed else ABORT_SECONDS)
        return [LogLine(f"{cause}, so vLLM ends on all parts"), *self._broadcast(f"end {cause}"), *terminate]

    def _exit(self, code: int) -> Exit:
        # The operator quotes the output from the last "error: ". vLLM prints others when it is terminated.
        return Exit(code, self._cause) if self._is_terminated else Exit(1, f"error: {self._cause}")

    def _report(self) -> str:
        expected = range(1, self.identity.nodes) if self.identity.rank == LEADER else (LEADER,)
        missing = [f"part {rank}" for rank in expected if rank not in self._peers]
        problem = f". Last problem: {self._problem}" if self._problem else ""
        return f"{self._label} waits for {', '.join(missing) or 'the other parts'}{problem}"

    def _broadcast(self, text: str) -> list[Action]:
        return [SendMessage(rank, text) for rank in self._peers]

    def _label_of(self, rank: int, name: str) -> str:
        return f"part {rank} of {self.identity.nodes} ({name})"
