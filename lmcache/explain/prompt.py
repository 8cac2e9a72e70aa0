"""Places of the chunks of one prompt, and reasons why chunks are nowhere. Pure.

A command names the chunks of a prompt by their keys, as the engine does (``chunk_keys``), and asks the
sidecar's page ``/prompt``. ``PromptPlaces`` joins the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from lmcache import keys
from lmcache.block_hashes import ExtraKeys, block_hashes
from lmcache.explain.causes import COMPUTED
from lmcache.kv_groups import GroupKind, KVGroup, longest_hit

VERSION = 1
"""Version of the page; it changes when a reader would misread the new format."""

MAX_KEYS = 512
"""Largest number of keys in a question, of all KV groups together."""

_NAME_BYTES, _MAX_BLOCKS = 8, 63
"""Bytes of a block's name in a question, and the largest number of blocks, as in Scheduled.first_blocks."""

PLACES = {"m": "memory", "d": "disk", "p": "peers", "r": "remote", "-": "nowhere", "?": "unknown"}
"""Names of places by letter, the fastest first."""
_ORDER = "".join(PLACES)
_HELD_BELOW = ("slower_than_computing", "too_late", "store_refused", "invalid")
"""Causes that also explain why a chunk of a lower tier was not loaded."""


@dataclass(frozen=True)
class Engine:
    """How one engine names the chunks of prompts."""

    engine: str
    model: str
    namespace: bytes
    private_reason: str
    chunk_tokens: int
    groups: tuple[KVGroup, ...]
    algorithm: str
    root: bytes
    block_tokens: int
    tags_extra_keys: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Engine:
        """Parse one engine of the answer to an empty question. Raises LookupError, TypeError, ValueError."""
        groups = [{**group, "kind": GroupKind[group["kind"]]} for group in fields["groups"]]
        hashes = fields["hash"]
        return cls(
            fields["engine"], fields["model"], bytes.fromhex(fields["namespace"]), fields["private_reason"],
            fields["chunk_tokens"], tuple(KVGroup(**group) for group in groups), hashes["algorithm"],
            bytes.fromhex(hashes["root"]), hashes["block_tokens"], hashes["tags_extra_keys"],
        )  # fmt: skip

    @property
    def is_full(self) -> bool:
        """True if all groups have full attention."""
        return all(group.is_full for group in self.groups)

    def num_chunks(self, num_tokens: int) -> int:
        """Return the number of chunks of a prompt that a request can load."""
        return max(0, num_tokens if self.is_full else num_tokens - 1) // self.chunk_tokens


class Named(NamedTuple):
    """Names of a prompt's chunks."""

    keys: tuple[list[bytes], ...]
    """Row keys per KV group, head first."""
    first_blocks: bytes
    """Names of the engine's blocks in the first chunk, without the last block."""


def chunk_keys(engine: Engine, tokens: Sequence[int], cache_salt: str = "") -> Named:
    """Return the names of a prompt's chunks. Raises ValueError for an invalid token id."""
    extra, step = ExtraKeys(cache_salt), engine.chunk_tokens // engine.block_tokens
    end = engine.num_chunks(len(tokens)) * engine.chunk_tokens
    hashes = list(
        block_hashes(tokens[:end], engine.block_tokens, engine.root, extra, is_tagged=engine.tags_extra_keys)
    )
    row_keys = tuple(
        [
            engine.namespace + key
            for key in keys.chunk_keys(hashes[step - 1 :: step], b"", cache_salt, group.group)
        ]
        for group in engine.groups
    )
    return Named(row_keys, b"".join(block[-_NAME_BYTES:] for block in hashes[: step - 1][:_MAX_BLOCKS]))


def questions(engine: Engine, named: Named) -> Iterator[dict[str, Any]]:
    """Yield the questions to the page, each about some chunks and the one before them."""
    num_chunks, size = len(named.keys[0]), MAX_KEYS // len(engine.groups)
    start = 0
    while start < num_chunks:
        first = max(0, start - 1)
        yield {
            "engine": engine.engine,
            "keys": [b"".join(part[first : first + size]).hex() for part in named.keys],
            "first_blocks": named.first_blocks.hex() if start == 0 else "",
        }
        start = first + size


class Run(NamedTuple):
    """Neighbouring chunks with the same place and cause."""

    first_token: int
    num_tokens: int
    place: str
    """A value of PLACES."""
    cause: str
    """Reason why the chunks are not in memory; empty if they are."""


@dataclass(frozen=True)
class PromptPlaces:
    """Places of the chunks of a prompt. Later prompts may change it at any time."""

    num_tokens: int
    common_tokens: int
    """Leading tokens that an earlier prompt had, at least."""
    memory_tokens: int
    """Leading tokens that a request would load from memory now."""
    reachable_tokens: int
    """Leading tokens that a request could load from all tiers, if they deliver in time."""
    runs: tuple[Run, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        fields = {"num_tokens": self.num_tokens, "common_tokens": self.common_tokens}
        fields |= {"memory_tokens": self.memory_tokens, "reachable_tokens": self.reachable_tokens}
        return {**fields, "runs": [run._asdict() for run in self.runs]}


def join(engine: Engine, num_tokens: int, answers: Sequence[Mapping[str, Any]]) -> PromptPlaces:
    """Join the page's answers to all questions. Raises LookupError, TypeError or ValueError."""
    places = ["" for _ in engine.groups]
    causes: list[str] = []
    blocks, known, other = "", "", ""
    for number, answer in enumerate(answers):
        repeated = (
            1 if number else 0
        )  # the first chunk of a later answer is the last one of the answer before
        num_blocks = len(answer["is_known"]) - len(answer["causes"])
        blocks += answer["is_known"][:num_blocks]
        known += answer["is_known"][num_blocks + repeated :]
        other = other[: len(other) - repeated] + answer["has_other_next"][num_blocks if number else 0 :]
        causes += answer["causes"][repeated:]
        places = [part + more[repeated:] for part, more in zip(places, answer["places"], strict=True)]
    num_chunks, chunk = len(causes), engine.chunk_tokens
    num_known = (known + "0").index("0")
    num_blocks = (blocks + "0").index("0")
    common = num_known * chunk or min(num_blocks * engine.block_tokens, chunk)
    last_common = len(blocks) + num_known - 1 if num_known else num_blocks - 1
    has_diverged = num_known < num_chunks and last_common >= 0 and other[last_common] == "1"
    missing = "diverged" if has_diverged else "new"
    letters = _slowest(engine, places)
    chunks = [
        (PLACES[letter], _cause(letter, cause, missing if is_known == "0" else ""))
        for letter, cause, is_known in zip(letters, causes, known, strict=True)
    ]
    in_memory, in_any = ([bytes(c in held for c in part) for part in places] for held in ("m", "mdr"))
    near, far = (longest_hit(engine.groups, chunk, held, 0, num_chunks) for held in (in_memory, in_any))
    return PromptPlaces(
        num_tokens, common, near * chunk, far * chunk, tuple(_runs(chunks, num_tokens, chunk))
    )


def _slowest(engine: Engine, places: Sequence[str]) -> str:
    """Return the slowest place of each chunk over the KV groups that need all chunks."""
    full = [part for group, part in zip(engine.groups, places, strict=True) if group.is_full] or places[:1]
    return "".join(max(letters, key=_ORDER.index) for letters in zip(*full, strict=True))


def _cause(letter: str, cause: str, missing: str) -> str:
    if letter == "m":
        return ""
    if letter == "?":
        return "tier_unavailable"
    if letter != "-":
        return cause if cause in _HELD_BELOW else ""
    return missing or cause


def _runs(chunks: Sequence[tuple[str, str]], num_tokens: int, chunk: int) -> Iterator[Run]:
    start = 0
    for (place, cause), part in groupby(chunks):
        length = len(list(part)) * chunk
        yield Run(start, length, place, cause)
        start += length
    if start < num_tokens:
        yield Run(start, num_tokens - start, PLACES["-"], "tail")


def lines(prompt: PromptPlaces) -> Iterator[str]:
    """Yield the lines that explain a prompt on a terminal."""
    yield f"The prompt has {prompt.num_tokens:,} tokens."
    yield f"An earlier prompt began with the same {prompt.common_tokens:,} tokens."
    yield ""
    yield f"{'TOKENS':>21}  {'WHERE':8}  WHY NOT"
    for run in prompt.runs:
        span = f"{run.first_token:,} - {run.first_token + run.num_tokens:,}"
        yield f"{span:>21}  {run.place:8}  {COMPUTED.get(run.cause, '')}".rstrip()
    yield ""
    below = prompt.reachable_tokens - prompt.memory_tokens
    loaded = [f"{prompt.memory_tokens:,} tokens from the memory tier"]
    loaded += [f"{below:,} from lower tiers, if they deliver in time"] if below > 0 else []
    rest = prompt.num_tokens - max(prompt.reachable_tokens, prompt.memory_tokens)
    yield f"A request with this prompt would now load {', and '.join(loaded)}. It would compute {rest:,}."
    yield "The engine's own cache is not included."
