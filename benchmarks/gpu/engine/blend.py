"""Prompts whose documents are reused at other positions, in slices beside a decoding request."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.engine.world import BLOCK_TOKENS, World
from testing.engine.process import EngineProcess, Generated
from testing.processes import SidecarProcess

_SELECTIONS = "all", "attended"
_SYSTEM_TOKENS, _QUESTION_TOKENS, _ANSWER_TOKENS = 8, 20, 8
_DOCUMENT = {"lmcache": {"document": True}}
_MAX_DIFFERENCE = 0.1
"""Largest difference of a logprob with equal KV: results of other batches round differently."""
_MEANING = "the connector computes blended prompts incorrectly: leave spec.engine.blend off"


class Blend:
    """The table of blended prompts."""

    def __init__(self, world: World) -> None:
        self._world = world
        half = world.sizes.prompts[1] // 2
        # The first one leaves tokens behind its last chunk, and starts within a block.
        self._documents = [world.prompt(tokens, "document") for tokens in (half - 7, half)]
        system, question = (world.prompt(tokens, "blend") for tokens in (_SYSTEM_TOKENS, _QUESTION_TOKENS))
        self._prompt = [*system, *self._documents[0], *self._documents[1], *question]
        self._num_known = sum(len(document) // BLOCK_TOKENS * BLOCK_TOKENS for document in self._documents)
        self._section = world.results.section(
            "Blended prompts",
            (
                *("selection", "tokens", "reused", "recomputed", "first token", "/ cold"),
                *("equal KV", "difference", "beside others"),
            ),
            "Documents at other positions, in slices of at most a quarter of the prompt. Equal KV: share of"
            " blocks with the same bytes as those of the cold prompt. Difference: of the first token's log"
            " probability. Beside others: the answer next to a decoding request is compared, up to rounding.",
        )

    @property
    def engine_arguments(self) -> dict[str, int]:
        """Arguments of an engine that blends the prompt in several slices."""
        return {"max_num_batched_tokens": max(256, len(self._prompt) // 4), "max_num_seqs": 128}

    def measure(self, engine: EngineProcess, sidecar: SidecarProcess) -> None:
        """Store the documents, then blend their prompt in each way: alone, and all at once."""
        engine.generate(*self._documents, max_tokens=1, kv_transfer_params=_DOCUMENT)
        sidecar.settled()
        stream = self._request(_SYSTEM_TOKENS, max_tokens=4 * _ANSWER_TOKENS, cache_salt="stream")
        requests = [stream, *map(self._blended_request, _SELECTIONS)]
        cold, *alone = (
            self._alone(engine, request)
            for request in (self._request(len(self._prompt), cache_salt="cold"), *requests)
        )
        engine.scrub_kv()
        together = engine.run(requests)
        if not are_equal(together[0], alone[0]):
            self._world.results.problem("a request decoded other tokens beside blended prompts", _MEANING)
        for selection, answer, joint in zip(_SELECTIONS, alone[1:], together[1:], strict=True):
            self._add(selection, cold, answer, joint)

    def _request(self, num_tokens: int, **options: Any) -> dict[str, Any]:
        return {"prompt": self._prompt[:num_tokens], "max_tokens": _ANSWER_TOKENS} | options

    def _blended_request(self, selection: str) -> dict[str, Any]:
        blend = {"start": _SYSTEM_TOKENS, "selection": selection}
        blend |= {"documents": [len(document) for document in self._documents]}
        parameters = {"lmcache": {"blend": blend}}
        return self._request(len(self._prompt), kv_transfer_params=parameters, first_step=4)

    def _alone(self, engine: EngineProcess, request: dict[str, Any]) -> Generated:
        engine.scrub_kv()
        (answer,) = engine.run([request | {"first_step": 1}])
        return answer

    def _add(self, selection: str, cold: Generated, answer: Generated, joint: Generated) -> None:
        counts = _counts(answer)
        difference = abs(answer.logprobs[0] - cold.logprobs[0])
        is_same_together = are_equal(joint, answer) and _counts(joint) == counts
        self._section.add(
            *(selection, f"{len(self._prompt)}", f"{counts.get('tokens')}", f"{counts.get('recomputed')}"),
            *(f"{answer.ttft * 1e3:.1f} ms", f"{answer.ttft / cold.ttft:.3f}"),
            *(f"{self._equal_share(cold, answer):.0%}", f"{difference:.2f}"),
            "same" if is_same_together else "other",
        )
        expected = self._num_known
        if counts.get("tokens", 0) + counts.get("recomputed", 0) != expected:
            what = f"{selection}: {counts} of the {expected} stored tokens were blended"
            self._world.results.problem(what, "the KV of documents is not found, or not copied")
        elif bool(counts["tokens"]) == (selection == "all"):
            self._world.results.problem(f"{selection}: {counts['tokens']} tokens were reused", _MEANING)
        elif selection == "all" and difference > _MAX_DIFFERENCE:
            what = f"all tokens recomputed: the first token's logprob differs by {difference:.3f}"
            self._world.results.problem(what, _MEANING)

    def _equal_share(self, cold: Generated, answer: Generated) -> float:
        num_blocks = len(self._prompt) // BLOCK_TOKENS
        pairs = [
            pair
            for layers in zip(cold.kv, answer.kv, strict=True)
            for pair in zip(*(layer[:num_blocks] for layer in layers), strict=True)
        ]
        return sum(int(first == second) for first, second in pairs) / len(pairs)


def _counts(answer: Generated) -> dict[str, int]:
    counts: dict[str, int] = (answer.kv_transfer_params or {}).get("lmcache", {}).get("blended", {})
    return counts


def are_equal(first: Generated, second: Generated) -> bool:
    """Return True if two answers differ by rounding only.

    Rounding decides between two tokens of nearly equal probability. Later tokens then differ, too.
    """
    steps = zip(first.tokens, second.tokens, first.logprobs, second.logprobs, strict=False)
    for token, other_token, logprob, other_logprob in steps:
        if abs(logprob - other_logprob) > _MAX_DIFFERENCE:
            return False
        if token != other_token:
            break
    return True
