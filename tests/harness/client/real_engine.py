"""Real vLLM engines on real sidecars, which wait for KV however busy the machine is, and their prompts.

Tests of deadlines start ``EngineProcess`` with ``connector_config`` instead.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.child_process import wait_until
from testing.engine.process import EngineProcess, Generated, ServedEngine, patient_config
from testing.processes import SidecarProcess

BLOCK, CHUNK = 32, 256

_SALTS = map("salt {}".format, itertools.count())


def make_prompt(num_tokens: int, seed: object = 0) -> list[int]:
    """Return token ids that depend on the length and the seed."""
    return random.Random(f"{num_tokens} {seed}").choices(range(4, 260), k=num_tokens)


@contextlib.contextmanager
def attached_engine(
    sidecar: SidecarProcess,
    folder: Path,
    config: dict[str, Any] | None = None,
    num_tokens: int = CHUNK + BLOCK,
    **options: Any,
) -> Iterator[EngineProcess]:
    """Start an engine, and wait until it hits a prompt of ``num_tokens``.

    ``options`` are those of ``EngineProcess``.
    """
    config = config or patient_config(sidecar.socket_path)
    with EngineProcess(folder / "log", config, **options) as engine:
        wait_hit(engine.wait_ready(), sidecar, num_tokens)
        yield engine


def wait_hit(
    engine: EngineProcess | ServedEngine, sidecar: SidecarProcess, num_tokens: int = CHUNK + BLOCK
) -> None:
    """Wait until the engine hits a prompt of its own, and all memory of the sidecar can be used.

    The sidecar reports an engine as attached before the engine's next lookup can find anything.
    """
    prompt = make_prompt(num_tokens, next(_SALTS))

    def is_hit() -> bool:
        if isinstance(engine, ServedEngine):
            return num_cached(engine.complete(prompt, 1)) > 0
        engine.scrub_kv()
        return engine.generate(prompt, max_tokens=1)[0].num_cached_tokens > 0

    wait_until(is_hit, what="a hit")
    sidecar.wait_usable()


def cold(engine: EngineProcess, *prompts: list[int], **options: Any) -> list[Generated]:
    """Run concurrently without hits: nothing is stored under the new salt, and KV does not depend on it."""
    return engine.generate(*prompts, cache_salt=next(_SALTS), **options)


def restart_with_empty_arena(
    engine: EngineProcess, sidecar: SidecarProcess, num_tokens: int = CHUNK + BLOCK
) -> None:
    """Empty the memory tier, once a lower tier has all rows."""
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    wait_hit(engine, sidecar, num_tokens)
    sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])


def num_cached(answer: dict[str, Any]) -> int:
    """Prompt tokens of an answer of ``vllm serve`` that the engine did not compute."""
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def assert_loaded(hit: Generated, stored: Generated, num_loaded: int, first_block: int = 0) -> None:
    """Check that loaded KV equals the KV of the request that stored it, byte for byte."""
    assert hit.num_cached_tokens == num_loaded
    for layer, (loaded, computed) in enumerate(zip(hit.kv, stored.kv, strict=True)):
        blocks = slice(first_block, num_loaded // BLOCK)
        assert len(loaded) >= blocks.stop
        assert loaded[blocks] == computed[blocks], f"layer {layer}"


def assert_hit(
    hit: Generated,
    stored: Generated,
    num_loaded: int,
    reference: Generated | None = None,
    first_block: int = 0,
) -> None:
    """Check a hit. ``stored`` stored the KV. ``reference`` computed the same prompt as ``hit``.

    The two differ if their prompts differ: batches of different shapes give KV that differs in the last bits.
    """
    assert_loaded(hit, stored, num_loaded, first_block)
    reference = reference or stored
    assert hit.tokens == reference.tokens
    assert hit.logprobs == pytest.approx(reference.logprobs, abs=1e-4)
