"""Prompts of documents for real engines that blend, and checks of their KV and answers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from testing.engine import kv_files
from testing.engine.process import EngineProcess, Generated
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import BLOCK, CHUNK, make_prompt

DOCUMENT = {"lmcache": {"document": True}}
"""Parameters of a request that announces its prompt as a document."""
SYSTEM_TOKENS, QUESTION_TOKENS = 21, 46
_SEEDS = map("document {}".format, itertools.count())


def make_tokens(num_tokens: int) -> list[int]:
    """Return tokens that no other prompt has."""
    return make_prompt(num_tokens, next(_SEEDS))


def num_known(num_tokens: int) -> int:
    """Tokens of an announced document whose KV is stored: all whole blocks."""
    return num_tokens // BLOCK * BLOCK


def num_rows(num_tokens: int) -> int:
    """Rows of an announced document: its whole chunks, and one for the blocks behind them."""
    return -(-num_known(num_tokens) // CHUNK)


@dataclass(frozen=True)
class Prompt:
    """A system prompt, documents and a question."""

    documents: tuple[list[int], ...]
    system: list[int]
    question: list[int]

    @classmethod
    def of(cls, *documents: list[int], system_tokens: int = SYSTEM_TOKENS) -> Prompt:
        return cls(documents, make_tokens(system_tokens), make_tokens(QUESTION_TOKENS))

    @property
    def tokens(self) -> list[int]:
        return [*self.system, *itertools.chain(*self.documents), *self.question]

    @property
    def num_known(self) -> int:
        """Tokens of its documents whose KV is stored once the documents are announced."""
        return sum(num_known(len(document)) for document in self.documents)

    def request(self, selection: str = "none", max_tokens: int = 8, **options: Any) -> dict[str, Any]:
        """Return a request of ``EngineProcess.run`` that asks to blend. ``ratio`` is one of the options."""
        blend: dict[str, Any] = {"documents": list(map(len, self.documents)), "selection": selection}
        blend |= {"start": len(self.system)}
        if (ratio := options.pop("ratio", None)) is not None:
            blend["ratio"] = ratio
        parameters = {"lmcache": {"blend": blend}}
        return {"prompt": self.tokens, "max_tokens": max_tokens, "kv_transfer_params": parameters} | options

    def unmarked(self, **options: Any) -> dict[str, Any]:
        """Return a request that asks to blend, and does not name its documents."""
        return self.request(**options) | {"kv_transfer_params": {"lmcache": {"blend": True}}}

    def ask(self, engine: EngineProcess, selection: str = "none", **options: Any) -> Generated:
        """Run the request alone."""
        (answer,) = engine.run([self.request(selection, **options)])
        return answer


def announce(
    engine: EngineProcess, sidecar: SidecarProcess, *documents: list[int], **options: Any
) -> list[Generated]:
    """Compute documents that are unknown so far, and wait until all their rows are stored."""
    num_rows_before = sidecar.settled()["memory"]["used_rows"]
    answers = engine.generate(*documents, max_tokens=1, kv_transfer_params=DOCUMENT, **options)
    expected = num_rows_before + sum(num_rows(len(document)) for document in documents)
    sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] >= expected)
    assert sidecar.settled()["memory"]["used_rows"] == expected
    return answers


def blended(answer: Generated) -> dict[str, int]:
    """Return what the answer says about blending; nothing if it was computed exactly."""
    counts: dict[str, int] = (answer.kv_transfer_params or {}).get("lmcache", {}).get("blended", {})
    return counts


@contextmanager
def saved_kv(engine: EngineProcess, folder: Path) -> Iterator[None]:
    """Save the KV of requests that finish in this context, see ``kv_of``."""
    engine.save_kv(folder)
    yield
    engine.save_kv(None)


def kv_of(answer: Generated, folder: Path) -> list[torch.Tensor]:
    """Return the content of a request's full blocks, by layer of each rank."""
    return kv_files.read(folder, answer.request_id)


def differences(first: list[torch.Tensor], second: list[torch.Tensor]) -> list[float]:
    """Largest difference of the KV of two requests in the blocks that both have, by layer."""
    pairs = list(zip(first, second, strict=True))
    assert pairs
    num_blocks = min(min(map(len, pair)) for pair in pairs)
    assert num_blocks
    return [float((layer[:num_blocks] - other[:num_blocks]).abs().max()) for layer, other in pairs]
