"""What can happen to two simulated engines on one sidecar, and what must be true when it is over."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from tests.harness.fake_model import TokenChain, answer
from tests.harness.sim_config import CHUNK
from tests.harness.sim_engine import SimEngine, right_drafts
from tests.harness.sim_world import SimWorld, assert_idle, make_tokens

_NUMBERS = itertools.count()

_engines = st.sampled_from((0, 1))
_arrival = st.tuples(
    st.just("arrive"),
    _engines,
    st.integers(0, 1),  # which prefix
    st.sampled_from((0, CHUNK - 3, CHUNK, 2 * CHUNK + 5, 3 * CHUNK)),  # how much of it
    st.sampled_from((1, 20, CHUNK)),  # own tokens
    st.sampled_from((1, 5, CHUNK + 2, CHUNK + 40)),  # of the answer
    st.integers(1, 4),  # so many of them
)
_steps = st.tuples(st.just("step"), _engines, st.integers(1, 12))
events = st.one_of(
    _arrival,
    _arrival,
    _steps,
    _steps,
    st.tuples(st.just("abort"), _engines, st.integers(0, 3)),
    st.tuples(st.sampled_from(("shut", "open")), st.sampled_from(("load_gate", "store_gate"))),
    st.tuples(st.sampled_from(("freeze", "thaw"))),
    st.tuples(st.just("drafts"), _engines, st.integers(0, 3)),
    st.tuples(st.just("reset"), _engines),
)


@dataclass
class Scenario:
    """The events' meanings, and what was asked of whom."""

    world: SimWorld
    engines: list[SimEngine]
    prefixes: list[list[int]] = field(default_factory=lambda: [make_tokens(3 * CHUNK) for _ in range(2)])
    asked: list[tuple[SimEngine, str, list[int], int]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    reset_under: set[str] = field(default_factory=set)
    """Requests whose answers may be of old and new weights."""

    def arrive(
        self, engine: int, prefix: int, num_shared: int, num_own: int, num_answer: int, times: int
    ) -> None:
        for _ in range(times):
            prompt = self.prefixes[prefix][:num_shared] + make_tokens(num_own)
            name = self.engines[engine].add(prompt, num_answer)
            self.asked.append((self.engines[engine], name, prompt, num_answer))

    def step(self, engine: int, times: int) -> None:
        for _ in range(times):
            self.engines[engine].step()

    def abort(self, engine: int, number: int) -> None:
        running = [name for of, name, *_ in self.asked if of is self.engines[engine]]
        if number < len(running) and self.engines[engine].results[running[number]].finish_reason is None:
            self.aborted.add(running[number])
            self.engines[engine].abort(running[number])

    def reset(self, engine: int) -> None:
        """As before a weight update; nothing, while vLLM can't."""
        if self.engines[engine].reset(b"weights %d" % next(_NUMBERS)):
            self.reset_under.update(name for of, name, *_ in self.asked if of is self.engines[engine])

    def shut(self, gate: str) -> None:
        getattr(self.world, gate).shut()

    def open(self, gate: str) -> None:
        getattr(self.world, gate).open()

    def freeze(self) -> None:
        self.world.sidecar.freeze()

    def thaw(self) -> None:
        self.world.sidecar.thaw()

    def drafts(self, engine: int, num_right: int) -> None:
        """From now on so many drafts are right."""

        def drafter(chain: TokenChain, num_drafts: int) -> list[int]:
            return right_drafts(chain, num_right) + [0] * (num_drafts - num_right)

        self.engines[engine].drafter = drafter

    def check(self) -> None:
        """When all is over."""
        self.thaw()
        self.world.open_gates()
        for engine in self.engines:
            assert_idle(engine)
        for engine, name, prompt, num_answer in self.asked:
            if name not in self.aborted | self.reset_under:
                assert engine.results[name].tokens == answer(prompt, num_answer, engine.weights)
        spoken = [prompt + engine.results[name].tokens for engine, name, prompt, _ in self.asked]
        for engine in self.engines:  # each finds what is its own
            for prompt in spoken:
                engine.add(prompt)
            assert_idle(engine)
        for engine in self.engines:
            assert not engine.leftovers()
        self.world.sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
        num_found = self.world.audit(self.engines[0].settings, spoken)
        event(f"found {'nothing' if not num_found else 'something'}")
        event(f"preempted: {any(engine.num_preemptions for engine in self.engines)}")

    def play(self, happens: list[tuple[Any, ...]]) -> None:
        """Let all of it happen, then check."""
        try:
            for what, *details in happens:
                getattr(self, what)(*details)
            self.check()
        finally:
            self.thaw()
