"""Times to the first token: cold, from vLLM's own cache, and from each tier. What is loaded is checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.gpu.engine.world import BLOCK_TOKENS, World
from benchmarks.gpu.results import held
from benchmarks.gpu.scale import Scale
from testing.engine.process import EngineProcess, Generated

ANSWER_TOKENS = 16
HIT_OF_COLD, HIT_OF_ENGINE_CACHE = 0.06, 1.3
"""Bars for the time to the first token of a hit of 8,192 tokens with a model of 8B."""
_BAR_TOKENS = 8193
_MEANING = "the cache gives wrong KV on this GPU: don't use it there, and send us the page"
_HEADINGS = (
    *("engine", "KV comes from", "tokens", "first token", "/ cold", "/ own cache", "load", "GB/s"),
    *("found", "KV", "answer", "bars"),
)


@dataclass(frozen=True)
class Reference:
    """A prompt, and what vLLM computes for it without this project."""

    prompt: list[int]
    cold: Generated
    engine_hit: Generated
    """Hit in vLLM's own cache. It computes the same single token as any other complete hit."""
    is_repeatable: bool
    """Do two hits in vLLM's own cache give the same answer?"""

    @property
    def num_hit_tokens(self) -> int:
        return len(self.prompt) - 1


class Hits:
    """The table of all hits."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._section = world.results.section(
            "Time to the first token",
            _HEADINGS,
            "A hit computes one token, with any cache. KV: the checksums of all loaded blocks equal those of"
            " the computed blocks. Answer: tokens and logprobs equal those of a hit in vLLM's own cache. vLLM"
            " runs without CUDA graphs, which makes all times longer.",
        )

    def reference(self, engine: EngineProcess, name: str, prompt: list[int]) -> Reference:
        """Compute a prompt, and hit it in vLLM's own cache."""
        (cold,) = engine.generate(prompt, max_tokens=ANSWER_TOKENS)
        self._section.add(name, "nothing: cold", f"{len(prompt)}", _milliseconds(cold.ttft), *[""] * 8)
        engine.stop_hashing_kv()
        first, engine_hit = (engine.generate(prompt, max_tokens=ANSWER_TOKENS)[0] for _ in range(2))
        engine.start_hashing_kv()
        reference = Reference(prompt, cold, engine_hit, _answer(first) == _answer(engine_hit))
        self._section.add(
            *(name, "vLLM's own cache", f"{len(prompt)}", _milliseconds(engine_hit.ttft)),
            *(f"{engine_hit.ttft / cold.ttft:.3f}", "1", "", "", f"{engine_hit.num_cached_tokens}", ""),
            "repeatable" if reference.is_repeatable else "not repeatable",
            "",
        )
        return reference

    def measure(
        self, engine: EngineProcess, name: str, source: str, references: Sequence[Reference], *, has_bar: bool
    ) -> None:
        """Hit prompts whose KV only ``source`` has."""
        num_loaded = _loaded_tokens(engine)
        for reference in references:
            (hit,) = engine.generate(reference.prompt, max_tokens=ANSWER_TOKENS)
            seconds = sum(engine.phases()["load"])
            self._add(name, source, reference, hit, seconds, has_bar=has_bar)
            before, num_loaded = num_loaded, _loaded_tokens(engine)
            what = f"{name}, {source}, {len(reference.prompt)} tokens"
            self._check(what, reference, hit, num_loaded - before)

    def _add(
        self, name: str, source: str, reference: Reference, hit: Generated, seconds: float, *, has_bar: bool
    ) -> None:
        num_bytes = reference.num_hit_tokens * self._world.sizes.shape.token_bytes
        of_cold, of_engine = hit.ttft / reference.cold.ttft, hit.ttft / reference.engine_hit.ttft
        is_bar_size = len(reference.prompt) == _BAR_TOKENS and self._world.sizes.shape == Scale().shape
        self._section.add(
            *(name, source, f"{len(reference.prompt)}", _milliseconds(hit.ttft)),
            *(f"{of_cold:.3f}", f"{of_engine:.2f}", _milliseconds(seconds)),
            f"{num_bytes / seconds / 1e9:.1f}" if seconds else "",
            f"{hit.num_used_cached_tokens}",
            "same" if _is_same_kv(reference, hit) else "**other**",
            "same" if _answer(hit) == _answer(reference.engine_hit) else "**other**",
            f"{held(of_cold, HIT_OF_COLD)}; {held(of_engine, HIT_OF_ENGINE_CACHE)}"
            if has_bar and is_bar_size and self._world.has_bars
            else "",
        )

    def _check(self, what: str, reference: Reference, hit: Generated, num_loaded: int) -> None:
        """Record problems."""
        problem = self._world.results.problem
        if hit.num_used_cached_tokens != reference.num_hit_tokens or num_loaded != reference.num_hit_tokens:
            problem(
                f"{what}: {hit.num_used_cached_tokens} tokens were a hit, and {num_loaded} were copied",
                "prompts are computed again, although their KV was stored",
            )
        elif not _is_same_kv(reference, hit):
            problem(f"{what}: bytes of KV differ", _MEANING)
        elif reference.is_repeatable and _answer(hit) != _answer(reference.engine_hit):
            problem(f"{what}: tokens or logprobs differ", _MEANING)


def _is_same_kv(reference: Reference, hit: Generated) -> bool:
    """Compare the blocks of the hit. Later blocks were computed in batches of other sizes."""
    num_blocks = reference.num_hit_tokens // BLOCK_TOKENS
    hit_kv, cold_kv = ([layer[:num_blocks] for layer in each.kv] for each in (hit, reference.cold))
    return bool(hit_kv) and hit_kv == cold_kv


def _answer(generated: Generated) -> tuple[list[int], list[float]]:
    return generated.tokens, generated.logprobs


def _loaded_tokens(engine: EngineProcess) -> int:
    """Tokens whose KV the connector copied into the engine, since the first call."""
    return sum(tokens for _, tokens in engine.loaded_tokens())


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
