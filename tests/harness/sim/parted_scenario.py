"""Random events for engines of several parts, with faults of each part, and the checks at the end."""

import os
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import event
from hypothesis import strategies as st

from lmcache_client.core.hits import KeyWords, find_hit
from lmcache_client.core.parts import PartNames
from lmcache_client.rpc.client import SidecarClient
from lmcache_store.tiers.memory.contracts import Found, Located
from testing.processes import SidecarProcess
from tests.harness.sidecar.wire import attached, make_keys
from tests.harness.sim.config import CHUNK
from tests.harness.sim.engine import SimEngine
from tests.harness.sim.scenario import Scenario
from tests.harness.sim.world import assert_idle, make_tokens, wait_attached

_NAMESPACE_WORDS = 4

_engines = st.sampled_from((0, 1))
_parts = st.sampled_from((0, 1, 1, 2))
_arrival = st.tuples(
    st.just("arrive_as"),
    st.sampled_from((None, None, "tenant a", "tenant b")),
    _engines,
    st.integers(0, 1),  # index of the prefix
    st.sampled_from((CHUNK, 2 * CHUNK + 5, 3 * CHUNK)),  # tokens of the prefix
    st.sampled_from((1, 20, CHUNK)),  # further tokens of the prompt
    st.sampled_from((1, 5, CHUNK + 2, CHUNK + 40)),  # tokens of the answer
    st.integers(1, 3),  # number of requests
)
_steps = st.tuples(st.just("step"), _engines, st.integers(1, 15))
_fault = st.tuples(
    st.just("fault"),
    _parts,
    st.sampled_from(("kill", "restart", "restart", "wipe", "shrink", "freeze", "thaw", "evict", "evict")),
)
events = st.one_of(
    _arrival,
    _arrival,
    _arrival,
    _steps,
    _steps,
    _steps,
    _fault,
    _fault,
    st.tuples(st.just("answers"), _engines, _parts, st.sampled_from((-1, 0, 1, 2, 8))),
    st.tuples(st.just("abort"), _engines, st.integers(0, 5)),
    st.tuples(
        st.just("gate"), st.sampled_from(("load_gate", "store_gate")), st.sampled_from(("shut", "open"))
    ),
    st.tuples(st.just("reset"), _engines),
)


class JointIndex:
    """Rows that all parts of an engine have, as read from the index of each sidecar."""

    def __init__(self, engine: SimEngine) -> None:
        self._indexes = {}
        for rank in engine.ranks:
            worker = rank.worker._worker
            session = worker._client.session
            assert session is not None, f"rank {rank.place} is not attached"
            self._indexes[rank.part] = session.index, worker._names

    def find_each(self, words: KeyWords) -> Located:
        """Return the rows of the first part. A row is there if all parts have it."""
        located = [index.find_each(_named(words, names)) for index, names in self._indexes.values()]
        is_there = np.logical_and.reduce([each.is_there for each in located])
        return Located(is_there, located[0].rows, located[0].generations)

    def find(self, words: KeyWords) -> Found:
        """Return the leading rows."""
        is_there, rows, generations = self.find_each(words)
        end = len(is_there) if is_there.all() else int(is_there.argmin())
        return Found(rows[:end], generations[:end])


def _named(words: KeyWords, names: PartNames | None) -> KeyWords:
    """Return the same keys in the namespace of another part."""
    if names is None or not len(words):
        return words
    words, namespace = words.copy(), words[0, :_NAMESPACE_WORDS].tobytes()
    words[:, :_NAMESPACE_WORDS] = np.frombuffer(names.namespace(namespace), "<u8")
    return words


def joint_hit(engine: SimEngine, name: str) -> int:
    """Tokens of a request that just arrived that all parts can load now."""
    side = engine.scheduler.connector._scheduler
    state, grid = side._states[name], side._grid
    state.ticket.make_keys([group.group for group in grid.stored])
    hit = find_hit(JointIndex(engine), grid, state.ticket.words)
    return int(grid.loadable_tokens(0, state.request.num_tokens, hit.num_chunks))


@dataclass
class PartedScenario(Scenario):
    """Runs the events of engines whose parts have a sidecar each."""

    @property
    def sidecars(self) -> list[SidecarProcess]:
        return self.world.sidecars

    def arrive_as(
        self, salt: str | None, engine: int, prefix: int, num_shared: int, num_further: int, num_answer: int,
        times: int,
    ) -> None:  # fmt: skip
        """Let requests of a tenant arrive."""
        for _ in range(times):
            prompt = self.prefixes[prefix][:num_shared] + make_tokens(num_further)
            name = self.engines[engine].add(prompt, num_answer, salt)
            self.requests.append((self.engines[engine], name, prompt, num_answer))

    def answers(self, engine: int, part: int, num_late_outputs: int) -> None:
        """Let the answers of a part be late from now on; -1: lost."""
        links = self.engines[engine].links
        link = links[part % len(links)]
        link.is_silent, link.num_late_outputs = num_late_outputs < 0, max(0, num_late_outputs)

    def fault(self, part: int, kind: str) -> None:
        """Let the sidecar of a part fail, or end its failure."""
        sidecar = self.sidecars[part % len(self.sidecars)]
        if kind == "kill":
            sidecar.kill()
        elif kind in ("restart", "wipe", "shrink"):
            self._restart(sidecar, has_arena=kind != "wipe", memory_size="1Mi" if kind == "shrink" else None)
        elif sidecar.is_running and kind == "evict":
            sidecar.thaw()
            self._evict(sidecar)
        elif sidecar.is_running:
            getattr(sidecar, kind)()

    def heal(self) -> None:
        """End all faults. Rows that were lost stay lost."""
        self.world.open_gates()
        for sidecar in self.sidecars:
            if sidecar.is_running:
                sidecar.thaw()
            else:
                sidecar.start()
        for engine in self.engines:
            for link in engine.links:
                link.is_silent, link.num_late_outputs = False, 0

    def check(self) -> None:
        """Check all answers, all KV, and that hits come back, after all events."""
        self.heal()
        for engine in self.engines:
            wait_attached(engine)
        super().check()
        for sidecar in self.sidecars:
            sidecar.wait_usable()
        for engine in self.engines:
            for prompt in [prompt for owner, _, prompt, _ in self.requests if owner is engine][-3:]:
                self._check_hits(engine, prompt)
            assert not engine.leftovers()
        for sidecar in self.sidecars:
            sidecar.wait_until(lambda stats: stats["memory"]["leased_rows"] == 0)
        for follower in self.sidecars[1:]:
            assert not follower.stats()["causes"].get("prompt_tokens"), "a relayed lookup was counted"
        event(f"waited for a part: {any(engine.waits.waited for engine in self.engines)}")

    def _check_hits(self, engine: SimEngine, prompt: list[int]) -> None:
        """After a request ran, all parts have its rows, and it hits all of them."""
        engine.serve(prompt)  # the sidecars verify adopted rows
        name = engine.add(prompt)
        expected = joint_hit(engine, name)
        assert_idle(engine)
        num_cached = engine.results[name].num_cached_tokens
        assert num_cached == expected, f"{num_cached} tokens hit, but all parts have {expected}"
        is_full = all(group.kind in ("full", "mla") for group in engine.settings.groups)
        if is_full:
            grid = engine.scheduler.connector._scheduler._grid
            num_all = grid.loadable_tokens(0, len(prompt), len(prompt) // CHUNK)
            assert expected == num_all, f"{expected} tokens hit of {num_all}"

    def _restart(self, sidecar: SidecarProcess, *, has_arena: bool, memory_size: str | None) -> None:
        sidecar.kill()
        if not has_arena:
            sidecar.arena_path.unlink(missing_ok=True)
        if memory_size is not None:
            sidecar.options["memory_size"] = memory_size
        sidecar.start()

    def _evict(self, sidecar: SidecarProcess) -> None:
        """Evict rows by those of another engine, as far as the sidecar is fast enough."""
        part = self.sidecars.index(sidecar)
        identity = next(rank.worker._worker.identity for rank in self.engines[0].ranks if rank.part == part)
        if identity is None:
            return
        hello = replace(identity.hello, engine_uuid=os.urandom(16), namespace=os.urandom(32))
        client = SidecarClient(sidecar.socket_path, hello)
        client.start()
        try:
            session = attached(client)
            memory = sidecar.stats()["memory"]
            group = next(group for group in hello.groups if group.chunk_bytes)
            keys = make_keys(*range(memory["capacity_rows"]), namespace=hello.namespace)
            session.abort([each.slot for each in session.reserve(group.group, keys) if each.slot])
        finally:
            client.close()
