"""Sources of the leading chunks of a request, a letter for each. Pure.

The letters are those of ``/samples``: e (the engine's own cache), m (memory), d (disk), p (memory
of other pods), r (remote tier).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from itertools import product

from lmcache_client.rpc import kvcache_pb2 as pb
from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.memory.contracts import Chains

_LOWER = {"disk": ord("d"), "peers": ord("p"), "remote": ord("r")}
_MEMORY = ord("m")
NAMES = {ord("e"): "engine", _MEMORY: "memory", **{letter: name for name, letter in _LOWER.items()}}
"""Names of the places, by letter."""
LOADED = "drpm"
"""Letters of chunks that the engine loads, the slowest tier first."""


def find_sources(chains: Chains, scheduled: pb.Scheduled, origins: MutableMapping[RowKey, str]) -> bytes:
    """Return one letter for each chunk of the hit, head first.

    ``origins`` maps rows that were promoted and not used since to their tier. Rows that this request uses are
    removed from it.
    """
    num_hit = min(scheduled.num_hit_chunks, chains.num_chunks)
    num_in_engine = min(scheduled.num_engine_chunks, num_hit)
    letters = bytearray(b"e" * num_in_engine + b"m" * (num_hit - num_in_engine))
    if origins:
        for keys, index in product(chains.keys, range(num_in_engine, num_hit)):
            name = origins.pop(keys[index], "")
            if name in _LOWER and letters[index] == _MEMORY:  # count a chunk once
                letters[index] = _LOWER[name]
    return bytes(letters)


def loaded_tokens(sources: bytes, num_loaded: int, chunk_tokens: int) -> dict[str, int]:
    """Split the ``num_loaded`` tokens that the engine loads by the tier that held them.

    It loads less than its chunks if it has half of a chunk itself, or must compute its last token.
    """
    split = {}
    for letter in LOADED:
        num_chunks = sources.count(letter.encode())
        if num_chunks:
            name = NAMES[ord(letter)]
            split[name] = min(num_loaded, num_chunks * chunk_tokens)
            num_loaded -= split[name]
    return split
