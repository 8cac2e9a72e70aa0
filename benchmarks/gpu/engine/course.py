"""The engines of the step ``vllm``, one after another."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from benchmarks.gpu.engine.blend import Blend
from benchmarks.gpu.engine.decode import Decode
from benchmarks.gpu.engine.hits import Hits, Reference
from benchmarks.gpu.engine.world import NoTimeError, World
from testing.engine import fork_server
from testing.engine.process import PATIENCE, EngineProcess
from testing.processes import RedisProcess, SidecarProcess

_CAUSE_SECONDS = 30.0
_LOWER_TIER_SECONDS = 60
"""Deadline of peers and Redis: the hit is measured, however long it takes."""


class Course:
    def __init__(self, world: World, *, has_redis: bool) -> None:
        self._world = world
        self._has_redis = has_redis
        self._hits, self._decode = Hits(world), Decode(world)
        sizes = world.sizes
        self._prompts = [world.prompt(tokens, number) for number, tokens in enumerate(sizes.prompts)]
        self._references: list[Reference] = []

    def run(self) -> None:
        """Run all engines. Raises NoTimeError and EngineFailed."""
        world = self._world
        with self._copies():
            sidecar = world.start_sidecar("sidecar")
            self._first(sidecar)
            self._restart(sidecar, "B", self._references)
            self._on_another_pod(sidecar)
            if world.scale.is_tiny:
                self._with_the_other_copier()
            self._without_connector()
            self._blended(sidecar)

    def _copies(self) -> contextlib.AbstractContextManager[None]:
        """On the simulated driver, processes start as copies of others: starts are not measured there."""
        return fork_server.allowed() if self._world.scale.is_tiny else contextlib.nullcontext()

    def _first(self, sidecar: SidecarProcess) -> None:
        with self._world.engine("A", sidecar) as engine:
            self._references = [self._hits.reference(engine, "A", prompt) for prompt in self._prompts]
            transfer = sidecar.settled()["transfer"]
            self._world.facts.add("slots copied by the sidecar", f"{transfer['copied_slots']}")
            if transfer["mode"] == "CudaIPC" and not transfer["copied_slots"]:
                self._world.results.problem(
                    f"the sidecar copied nothing: {transfer['left_to_engines']}",
                    "the engine copies its KV itself, which slows it down",
                )
            self._measure(engine, "A", "memory, first load")
            self._measure(engine, "A", "memory", has_bar=True)
            self._decode.alone(engine, "A")
            self._decode.with_prompts(engine, "A", "prompts arrive, and are stored", has_bar=True)
            self._decode.with_a_reader(engine, "A", sidecar)

    def _restart(self, sidecar: SidecarProcess, name: str, references: list[Reference]) -> None:
        """Start new engines, which hit the prompts of an earlier one."""
        for _ in range(self._world.sizes.restarts):
            with self._world.engine(name, sidecar) as engine:
                self._measure(engine, name, "memory, after a restart of the engine", references)

    def _measure(
        self,
        engine: EngineProcess,
        name: str,
        source: str,
        references: list[Reference] | None = None,
        *,
        has_bar: bool = False,
    ) -> None:
        """Overwrite all KV of the engine, then hit the prompts."""
        engine.scrub_kv()
        self._hits.measure(engine, name, source, references or self._references, has_bar=has_bar)

    def _on_another_pod(self, sidecar: SidecarProcess) -> None:
        """Hit the prompts on a pod that has none of their rows, then a prompt that only Redis has."""
        world = self._world
        peers = world.folder / "peers.yaml"
        peers.write_text(f"peers: ['{sidecar.options['peer_host']}:{sidecar.options['peer_port']}']\n")
        with contextlib.ExitStack() as stack:
            options: dict[str, Any] = {"peers_file": peers, "memory_size": world.sizes.other_memory_bytes}
            options |= {"peer_answer_seconds": _LOWER_TIER_SECONDS}
            options |= {"remote_timeout_seconds": _LOWER_TIER_SECONDS}
            if self._has_redis:
                options["remote_url"] = stack.enter_context(RedisProcess()).unix_url
            other = world.start_sidecar("other", **options)
            engine = stack.enter_context(world.engine("C", other, None, **PATIENCE))
            self._measure(engine, "C", "another pod's memory")
            self._check_cause(other, "peers")
            if not self._has_redis:
                world.facts.add("hit from Redis", "not run: there is no redis-server on PATH")
                return
            remote = self._hits.reference(engine, "C", world.prompt(world.sizes.prompts[0], "remote"))
            other.settled()  # its rows are in Redis
            other.kill()
            other.arena_path.unlink()
            other.start()
            other.wait_attached(engine.run_short_request)
            self._measure(engine, "C", "Redis", [remote])
            self._check_cause(other, "remote")

    def _check_cause(self, sidecar: SidecarProcess, cause: str) -> None:
        """Check where the KV came from."""
        with contextlib.suppress(AssertionError):  # the sidecar counts causes when the load has ended
            sidecar.wait_until(
                lambda stats: stats["causes"]["cause_tokens"].get(cause), timeout=_CAUSE_SECONDS
            )
        causes = sidecar.stats()["causes"]["cause_tokens"]
        self._world.facts.add(f"tokens of engine C by cause, with {cause}", json.dumps(causes))
        if cause not in causes:
            self._world.results.problem(f"no KV came from {cause}: {causes}", "KV of other pods is not used")

    def _with_the_other_copier(self) -> None:
        """Store and load with an engine that makes all copies."""
        sidecar = self._world.start_sidecar("shared", transfer="SharedMemory")
        with self._world.engine("E", sidecar) as engine:
            reference = self._hits.reference(engine, "E", self._prompts[0])
            sidecar.settled()
            self._measure(engine, "E", "memory", [reference])
        self._restart(sidecar, "E", [reference])

    def _without_connector(self) -> None:
        with contextlib.ExitStack() as stack:
            try:
                engine = stack.enter_context(self._world.engine("D", None))
            except NoTimeError as error:  # only a comparison
                self._world.facts.add("engine D, without connector", f"not run: {error}")
                return
            for prompt in self._prompts:
                self._hits.reference(engine, "D", prompt)
            self._decode.alone(engine, "D")
            self._decode.with_prompts(engine, "D", "prompts arrive", has_bar=False)

    def _blended(self, sidecar: SidecarProcess) -> None:
        blend = Blend(self._world)
        try:
            with self._world.engine("F", sidecar, blend.engine_arguments, blend="request") as engine:
                blend.measure(engine, sidecar)
        except NoTimeError as error:
            self._world.facts.add("engine F, which blends prompts", f"not run: {error}")
