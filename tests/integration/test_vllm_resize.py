"""A real engine gives right answers and hits while its sidecar's memory tier grows and shrinks."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, Generated
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, attached_engine, make_prompt
from tests.harness.sidecar.resized_sidecar import ResizedSidecar

pytestmark = pytest.mark.vllm

NUM_HOT, NUM_PROMPTS, NUM_CHUNKS = 3, 18, 4


class Load:
    """An engine that always has running and queued requests. The first prompts are the most frequent."""

    def __init__(self, engine: EngineProcess, prompts: Sequence[list[int]]) -> None:
        self._engine, self._prompts = engine, prompts
        salts = map("salt {}".format, itertools.count())
        self._references = [engine.generate(prompt, cache_salt=next(salts))[0] for prompt in prompts]
        self._known = [KnownKV() for _ in prompts]
        for known, reference in zip(self._known, self._references, strict=True):
            known.add(reference)
        self._order = random.Random(0)
        self._is_over = threading.Event()
        self.hits: list[int] = []
        """Cached tokens of the prompts of each round."""

    def during(self, action: Callable[[], None]) -> None:
        """Run rounds of requests until the action ends. Raises the errors of both."""
        with ThreadPoolExecutor(1) as pool:
            rounds = pool.submit(self._run)
            try:
                action()
            finally:
                self._is_over.set()
            rounds.result()

    def wait_rounds(self, number: int) -> None:
        """Wait until this number of further rounds has begun."""
        num_rounds = len(self.hits) + 1 + number  # one round is in progress
        wait_until(lambda: self._is_over.is_set() or len(self.hits) >= num_rounds, timeout=120)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self.hits.append(self._round())
        finally:
            self._is_over.set()

    def _round(self) -> int:
        hot, cold = range(NUM_HOT), range(NUM_HOT, len(self._prompts))
        numbers = [*hot, *hot, *self._order.sample(cold, 6)]
        self._order.shuffle(numbers)
        self._engine.scrub_kv()  # so that blocks that a load fails to write are not right by chance
        answers = self._engine.generate(*(self._prompts[number] for number in numbers))
        for number, answer in zip(numbers, answers, strict=True):
            self._known[number].add(answer)
        for number, answer in zip(numbers, answers, strict=True):
            assert (answer.tokens, answer.finish_reason) == (self._references[number].tokens, "length")
            self._known[number].check(answer)
        return sum(answer.num_cached_tokens for answer in answers)


class KnownKV:
    """Digests of every KV that the engine computed for one prompt, by layer and block.

    An evicted chunk is computed again in a batch of another shape. On some processors that changes the last
    bits of its KV, so a loaded block must equal any of the computed ones, and not the first one.
    """

    def __init__(self) -> None:
        self._digests: set[tuple[int, int, str]] = set()

    def add(self, answer: Generated) -> None:
        """Add the blocks that this request computed."""
        first = answer.num_used_cached_tokens // BLOCK
        self._digests |= {key for key in _digests(answer) if key[1] >= first}

    def check(self, answer: Generated) -> None:
        """Compare the blocks that this request found in a cache."""
        end = answer.num_used_cached_tokens // BLOCK
        wrong = [key for key in _digests(answer) if key[1] < end and key not in self._digests]
        assert not wrong, f"layer, block and digest of KV that was never computed: {wrong}"


def _digests(answer: Generated) -> Iterator[tuple[int, int, str]]:
    for layer, blocks in enumerate(answer.kv):
        for block, digest in enumerate(blocks):
            yield layer, block, digest


def clients(sized: ResizedSidecar) -> set[tuple[str, int]]:
    """Id and epoch of each client."""
    return {(client["uuid"], client["epoch"]) for client in sized.sidecar.stats()["clients"]}


@pytest.fixture
def sized(tmp_path: Path) -> Iterator[ResizedSidecar]:
    path = tmp_path / "memory-size"
    path.write_text("32Mi")
    options = {"memory_size": "32Mi", "memory_max_size": "64Mi", "memory_size_file": path}
    with SidecarProcess(**options) as sidecar:
        yield ResizedSidecar(sidecar, path)


def test_engine_under_load_is_not_disturbed_by_resizes(tmp_path, sized):
    """All prompts together have 72 MiB of KV, the hot ones 12 MiB: hits, stores and evictions never stop."""
    prompts = [make_prompt(NUM_CHUNKS * CHUNK + 40, number) for number in range(NUM_PROMPTS)]
    with attached_engine(sized.sidecar, tmp_path, max_num_seqs=2) as engine:
        load = Load(engine, prompts)
        clients_before = clients(sized)

        def resize() -> None:
            load.wait_rounds(2)
            for mebibytes in (64, 32, 64, 32):
                sized.write_size(f"{mebibytes}Mi")
                assert sized.settle(mebibytes)["max_bytes"] == 64 << 20
                load.wait_rounds(1)

        load.during(resize)
        assert clients(sized) == clients_before  # no client attached again
        assert engine.is_running
    assert min(load.hits[2:]) > 0, load.hits
    assert sized.memory["removed"]["evicted"] > 0
