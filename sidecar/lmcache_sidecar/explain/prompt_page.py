"""The page ``/prompt``: where the chunks of a prompt are now, for a command on this machine.

The command names the chunks by their keys, which are hashes. The sidecar learns no content of a prompt, and
records nothing of the question.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from lmcache.explain.prompt import MAX_KEYS, VERSION
from lmcache.rpc import service
from lmcache.tiers.base import ROW_KEY_BYTES, RowKey
from lmcache.tiers.tiered.absences import Absence
from lmcache.tiers.tiered.history import chunk_names
from lmcache.tiers.tiered.places import MEMORY
from lmcache.tiers.tiered.store import TieredStore
from lmcache_sidecar.clients.registry import Client
from lmcache_sidecar.clients.validation import Peer
from lmcache_sidecar.explain.causes import STORING_SECONDS, first_block_names

_SLICE = 64
"""Chunks whose causes are found before other tasks run: less than 1 ms."""


class _Question(NamedTuple):
    peer: Peer
    keys: list[list[RowKey]]
    """Row keys per KV group that stores KV, head first."""
    first_blocks: bytes


async def answer(
    body: bytes, clients: Iterable[Client], store: TieredStore | None, clock: Callable[[], float] = time.time
) -> bytes:
    """Return the JSON text of the answer. Raises ValueError for a bad question.

    An empty object as the question returns how the attached engines name chunks.
    """
    try:
        fields = json.loads(body)
    except RecursionError:
        raise ValueError("the question is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("the question must be a JSON object")
    schedulers = [client for client in clients if client.is_attached and not client.peer.is_worker]
    if not fields or store is None:
        return _json(engines=[_engine(client) for client in schedulers])
    question = _parse(fields, {client.peer.engine.hex(): client.peer for client in schedulers})
    places = await asyncio.gather(*map(store.places, question.keys))  # together, for tiers that are slow
    first = question.keys[0]
    names = np.concatenate((first_block_names(question.first_blocks, first[0]), chunk_names(first)))
    known = store.history.look(names)
    seconds, now = known.first_seconds[len(names) - len(first) :].tolist(), clock()
    causes: list[str] = []
    for start in range(0, len(first), _SLICE):
        for chunk in range(start, min(start + _SLICE, len(first))):
            is_recent = now - seconds[chunk] < STORING_SECONDS
            causes.append(_cause([keys[chunk] for keys in question.keys], places, chunk, store, is_recent))
        await asyncio.sleep(0)
    return _json(
        places=places,
        causes=causes,
        is_known=_digits(known.is_looked_up),
        has_other_next=_digits(known.has_other_next),
    )


def _engine(client: Client) -> dict[str, Any]:
    """Return what a command needs to name the chunks of a prompt as this engine does."""
    hello, hashes = client.peer.hello, client.peer.hello.block_hashes
    return {
        "engine": client.peer.engine.hex(),
        "model": hello.model,
        "namespace": (client.namespace or hello.namespace).hex(),
        "private_reason": hello.private_reason,
        "chunk_tokens": hello.geometry.chunk_tokens,
        "groups": [
            {
                "group": group.group, "kind": group.kind.name, "block_tokens": group.block_tokens,
                "window_tokens": group.window_tokens, "chunk_bytes": group.chunk_bytes,
            }
            for group in client.peer.stored_groups
        ],
        "hash": {
            "algorithm": hashes.algorithm, "root": hashes.root.hex(), "block_tokens": hashes.block_tokens,
            "tags_extra_keys": hashes.tags_extra_keys,
        },
    }  # fmt: skip


def _parse(fields: dict[str, Any], peers: dict[str, Peer]) -> _Question:
    peer = peers.get(str(fields.get("engine")))
    if peer is None:
        raise ValueError("no engine of this id is attached: ask again with {} for the present engines")
    parts = fields.get("keys")
    if not isinstance(parts, list) or len(parts) != len(peer.stored_groups):
        raise ValueError(f"keys must be a list of {len(peer.stored_groups)} texts, one for each KV group")
    packed = [_bytes("keys", part, ROW_KEY_BYTES) for part in parts]
    if not packed[0] or len(set(map(len, packed))) != 1 or sum(map(len, packed)) > MAX_KEYS * ROW_KEY_BYTES:
        raise ValueError(f"keys must be of the same chunks in each KV group, at most {MAX_KEYS} in all")
    first_blocks = _bytes("first_blocks", fields.get("first_blocks", ""), service.NAME_BYTES)
    if len(first_blocks) > service.MAX_FIRST_BLOCKS * service.NAME_BYTES:
        raise ValueError(f"first_blocks must be of at most {service.MAX_FIRST_BLOCKS} blocks")
    keys = [
        [part[start : start + ROW_KEY_BYTES] for start in range(0, len(part), ROW_KEY_BYTES)]
        for part in packed
    ]
    return _Question(peer, keys, first_blocks)


def _bytes(name: str, text: Any, item_bytes: int) -> bytes:
    value = bytes.fromhex(text) if isinstance(text, str) else b"x"
    if len(value) % item_bytes:
        raise ValueError(f"{name} must be hexadecimal digits, {2 * item_bytes} for each")
    return value


def _cause(
    keys: Sequence[RowKey], places: Sequence[str], chunk: int, store: TieredStore, is_recent: bool
) -> str:
    """Return why a chunk is not in memory, if a request looked it up; empty: it is in memory."""
    absent = [key for key, letters in zip(keys, places, strict=True) if letters[chunk] != MEMORY]
    if not absent:
        return ""
    absence = store.absence(absent[0])
    if absence is Absence.NOT_STORED and is_recent:
        absence = Absence.BEING_STORED
    return absence.value


def _digits(flags: np.typing.NDArray[np.bool_]) -> str:
    return "".join("1" if flag else "0" for flag in flags.tolist())


def _json(**fields: Any) -> bytes:
    return json.dumps({"version": VERSION, **fields}).encode() + b"\n"
