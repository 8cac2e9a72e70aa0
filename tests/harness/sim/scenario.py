"""Random events for two simulated engines on one sidecar, and the checks at the end."""

import itertools
from dataclasses import dataclass, field
from typing import Any

from hypothesis import event
from hypothesis import strategies as st

from tests.harness.client.fake_model import TokenChain, answer
from tests.harness.sim.config import CHUNK
from tests.harness.sim.engine import SimEngine, right_drafts
from tests.harness.sim.world import SimWorld, assert_idle, make_tokens

_NUMBERS = itertools.count()

_engines = st.sampled_from((0, 1))
_arrival = st.tuples(
    st.just("arrive"),
    _engines,
    st.integers(0, 1),  # index of the prefix
    st.sampled_from((0, CHUNK - 3, CHUNK, 2 * CHUNK + 5, 3 * CHUNK)),  # tokens of the prefix
    st.sampled_from((1, 20, CHUNK)),  # further tokens of the prompt
    st.sampled_from((1, 5, CHUNK + 2, CHUNK + 40)),  # tokens of the answer
    st.integers(1, 4),  # number of requests
)
_steps = st.tuples(st.just("step"), _engines, st.integers(1, 12))
events = st.one_of(
    _arrival,
    _arrival,
    _steps,
    _steps,
    st.tuples(st.just("abort"), _engines, st.integers(0, 3)),
    st.tuples(
        st.just("gate"), st.sampled_from(("load_gate", "store_gate")), st.sampled_from(("shut", "open"))
    ),
    st.tuples(st.just("sidecar"), st.sampled_from(("freeze", "thaw"))),
    st.tuples(st.just("drafts"), _engines, st.integers(0, 3)),
    st.tuples(st.just("reset"), _engines),
)


@dataclass
class Scenario:
    """Runs the events, and records the requests of each engine."""

    world: SimWorld
    engines: list[SimEngine]
    prefixes: list[list[int]] = field(default_factory=lambda: [make_tokens(3 * CHUNK) for _ in range(2)])
    requests: list[tuple[SimEngine, str, list[int], int]] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)
    reset_under: set[str] = field(default_factory=set)
    """Requests whose answers may mix old and new weights."""

    def arrive(
        self, engine: int, prefix: int, num_shared: int, num_further: int, num_answer: int, times: int
    ) -> None:
        for _ in range(times):
            prompt = self.prefixes[prefix][:num_shared] + make_tokens(num_further)
            name = self.engines[engine].add(prompt, num_answer)
            self.requests.append((self.engines[engine], name, prompt, num_answer))

    def step(self, engine: int, times: int) -> None:
        for _ in range(times):
            self.engines[engine].step()

    def abort(self, engine: int, number: int) -> None:
        running = [name for owner, name, *_ in self.requests if owner is self.engines[engine]]
        if number < len(running) and self.engines[engine].results[running[number]].finish_reason is None:
            self.aborted.add(running[number])
            self.engines[engine].abort(running[number])

    def reset(self, engine: int) -> None:
        """Pause, reset the caches and resume, as for a weight update. Resume early if a load is held back."""
        if self.engines[engine].reset(b"weights %d" % next(_NUMBERS), max_steps=20):
            self.reset_under.update(
                name for owner, name, *_ in self.requests if owner is self.engines[engine]
            )

    def gate(self, gate: str, action: str) -> None:
        """Shut or open a gate."""
        getattr(getattr(self.world, gate), action)()

    def sidecar(self, action: str) -> None:
        """Freeze or thaw the sidecar."""
        getattr(self.world.sidecar, action)()

    def drafts(self, engine: int, num_right: int) -> None:
        """Let the first ``num_right`` drafts of each step be right from now on."""

        def drafter(chain: TokenChain, num_drafts: int) -> list[int]:
            return right_drafts(chain, num_right) + [0] * (num_drafts - num_right)

        self.engines[engine].drafter = drafter

    def check(self) -> None:
        """Check all answers and all committed KV, after all events."""
        self.world.sidecar.thaw()
        self.world.open_gates()
        for engine in self.engines:
            assert_idle(engine)
        for engine, name, prompt, num_answer in self.requests:
            if name not in self.aborted | self.reset_under:
                assert engine.results[name].tokens == answer(prompt, num_answer, engine.weights)
        token_lists = [prompt + engine.results[name].tokens for engine, name, prompt, _ in self.requests]
        for engine in self.engines:  # each engine must read only right KV
            for tokens in token_lists:
                engine.add(tokens)
            assert_idle(engine)
        for engine in self.engines:
            assert not engine.leftovers()
        self.world.sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
        num_found = self.world.audit(self.engines[0].settings, token_lists)
        event(f"found {'nothing' if not num_found else 'something'}")
        event(f"preempted: {any(engine.num_preemptions for engine in self.engines)}")

    def play(self, steps: list[tuple[Any, ...]]) -> None:
        """Run the events, then check."""
        try:
            for name, *arguments in steps:
                getattr(self, name)(*arguments)
            self.check()
        finally:
            self.world.sidecar.thaw()
