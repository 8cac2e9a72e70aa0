"""Decode steps while KV is stored, and while another pod reads rows of this pod."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from benchmarks.gpu.engine.world import World
from benchmarks.gpu.results import held
from testing.child_process import REPOSITORY, ChildProcess, wait_until
from testing.engine.process import EngineProcess
from testing.processes import SidecarProcess

MAX_SLOWDOWN = 1.05
"""Bar for the 99th percentile of a decode step while KV is stored."""
_STREAM_PROMPT_TOKENS = 64
_FIRST_STEP = 8
"""Step before which the first stored prompt arrives. All streams decode by then."""


class Decode:
    """The table of decode steps."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = 0
        self._alone: dict[str, float] = {}
        """99th percentile of a step without any other work, by engine."""
        sizes = world.sizes
        self._section = world.results.section(
            "Decoding beside the cache",
            ("engine", "meanwhile", "steps", "p50", "p99", "longest", "p99 / alone", "bar"),
            f"{sizes.streams} requests decode {sizes.stream_tokens} tokens each, {sizes.rounds} times."
            " Counted are steps in which all of them decode, and nothing else is computed.",
        )

    def alone(self, engine: EngineProcess, name: str) -> None:
        """Decode without other work."""
        self._add(name, "nothing", self._rounds(engine, 0), has_bar=False)

    def with_prompts(self, engine: EngineProcess, name: str, what: str, *, has_bar: bool) -> None:
        """Decode while cold prompts arrive one after another. Their KV is stored after their steps."""
        self._add(name, what, self._rounds(engine, self._world.sizes.stored_prompts), has_bar=has_bar)

    def with_a_reader(self, engine: EngineProcess, name: str, sidecar: SidecarProcess) -> None:
        """Decode while another process reads the rows of the sidecar, as the sidecar of another pod does."""
        with self._reader(sidecar) as bytes_per_second:
            steps = self._rounds(engine, 0)
            what = f"another pod reads {bytes_per_second() / 1e9:.2f} GB/s from the sidecar"
        self._add(name, what, steps, has_bar=False)

    def _rounds(self, engine: EngineProcess, num_prompts: int) -> list[float]:
        """Seconds of the steps that only decode."""
        engine.stop_hashing_kv()
        steps = []
        for _ in range(self._world.sizes.rounds):
            self._turn += 1
            steps += self._round(engine, num_prompts)
        engine.start_hashing_kv()
        return steps

    def _round(self, engine: EngineProcess, num_prompts: int) -> list[float]:
        sizes, prompt = self._world.sizes, self._world.prompt
        requests = [
            {"prompt": prompt(_STREAM_PROMPT_TOKENS, f"stream {self._turn} {number}")}
            | {"max_tokens": sizes.stream_tokens}
            for number in range(sizes.streams)
        ]
        distance = (sizes.stream_tokens - _FIRST_STEP) // max(1, num_prompts)
        requests += [
            {"prompt": prompt(sizes.prompts[0], f"stored {self._turn} {number}")}
            | {"max_tokens": 1, "first_step": _FIRST_STEP + distance * number}
            for number in range(num_prompts)
        ]
        engine.run(requests)
        return [seconds for seconds, num_tokens in engine.steps() if num_tokens == sizes.streams]

    def _add(self, name: str, what: str, steps: list[float], *, has_bar: bool) -> None:
        steps = sorted(steps)
        p99 = steps[int(len(steps) * 0.99)]
        alone = self._alone.setdefault(name, p99)
        self._section.add(
            *(name, what, f"{len(steps)}", _milliseconds(steps[len(steps) // 2]), _milliseconds(p99)),
            *(_milliseconds(steps[-1]), f"{p99 / alone:.3f}"),
            held(p99 / alone, MAX_SLOWDOWN) if has_bar and self._world.has_bars else "",
        )

    @contextmanager
    def _reader(self, sidecar: SidecarProcess) -> Iterator[Callable[[], float]]:
        """Start a reader. Yields a function that returns its bytes per second."""
        log = self._world.results.folder / "peer-reader.log"
        log.unlink(missing_ok=True)
        options = sidecar.options
        module = "benchmarks.gpu.engine.peer_reader"
        with ChildProcess("the reader of rows", log) as reader:
            reader.spawn(
                [sys.executable, "-m", module]
                + [str(each) for each in (sidecar.arena_path, options["peer_host"], options["peer_port"])],
                cwd=str(REPOSITORY),
            )

            def reports() -> list[str]:
                reader.check()
                return [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]

            def bytes_per_second() -> float:
                num_bytes, seconds = map(float, reports()[-1].split())
                return num_bytes / seconds

            wait_until(reports, timeout=30, what="the reader has read all rows once")
            yield bytes_per_second


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
