"""Chunk keys, namespaces and tenants. Pure: the results are the same in every process and on every machine.

Every digest here is SHA-256 (or HMAC-SHA-256) of a *pre-image*. A pre-image starts with a tag that names the
kind of digest and its version, and every field is preceded by its length. Two different inputs therefore
never have the same pre-image. A change of any byte of a pre-image orphans every object stored so far; the
golden tests detect such changes.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Union

CHUNK_TAG = b"lmcache chunk 1"
NAMESPACE_TAG = b"lmcache namespace 1"
TENANT_TAG = b"lmcache tenant 2"
SALT_TAG = b"lmcache salt 1"
MEDIA_TAG = b"lmcache media 1"
PART_TAG = b"lmcache part 1"

Listed = Union[None, bool, int, float, str, bytes, "Sequence[Listed]", "Mapping[str, Listed]"]
"""Values that the listing of a namespace may contain."""


def chunk_keys(
    block_hashes: Iterable[bytes], lora_fingerprint: bytes = b"", cache_salt: str = "", group: int = 0
) -> list[bytes]:
    """Return the keys of chunks (32 bytes each).

    A block hash is the engine's hash of the chunk's last block, which covers all tokens up to its end. The
    engine's hash also covers LoRA and salt, but without tags, so that one can imitate the other. Therefore
    the key contains both again.

    The most recent keys are cached, because many prompts begin alike, and each turn of a conversation begins
    like the turn before.
    """
    qualifiers = b"".join(map(sized, (lora_fingerprint, _utf8(cache_salt), _integer(group))))
    return list(map(_chunk_key, block_hashes, itertools.repeat(qualifiers)))


@functools.lru_cache(8192)  # about 3 MB
def _chunk_key(block_hash: bytes, qualifiers: bytes) -> bytes:
    return hashlib.sha256(sized(CHUNK_TAG) + sized(block_hash) + qualifiers).digest()


def media_fingerprint(lora_fingerprint: bytes, media: Sequence[bytes]) -> bytes:
    """Return a substitute for the LoRA fingerprint, for chunks that also depend on ``media`` (digests)."""
    return hashlib.sha256(b"".join(map(sized, (MEDIA_TAG, lora_fingerprint, *media)))).digest()


def namespace(listing: Mapping[str, Listed]) -> bytes:
    """Return the name (32 bytes) of the set of all chunks that engines with this ``listing`` can share.

    ``listing`` is everything that determines the bytes of KV: weights, effective model config, KV dtype,
    layout, geometry, sizes, hash algorithm. The order of keys does not matter. Types do: 1, 1.0, True and "1"
    differ. Sequences with the same items are equal.

    Raises TypeError, which names the place, for a key or value of a type that has no canonical form.
    """
    return hashlib.sha256(sized(NAMESPACE_TAG) + _canonical(listing, "listing")).digest()


def part_namespace(engine_namespace: bytes, part: int) -> bytes:
    """Return the namespace (32 bytes) of the rows of an engine's part, which have the columns of one node."""
    return hashlib.sha256(b"".join(map(sized, (PART_TAG, engine_namespace, _integer(part))))).digest()


def salt_hash(cache_salt: str) -> bytes:
    """Return the hash (32 bytes) by which budgets name a cache salt.

    Anyone who can guess a salt can confirm the guess with this hash.
    """
    return hashlib.sha256(sized(SALT_TAG) + sized(_utf8(cache_salt))).digest()


def tenant(cache_salt: str, secret: bytes = b"") -> bytes:
    """Return an opaque, stable name of a cache salt for budgets and metrics, or b"" without a salt.

    Engines use their namespace as the ``secret``. Anyone who knows the secret and can guess a salt can
    confirm the guess with this name.
    """
    return tenant_of_hash(salt_hash(cache_salt), secret) if cache_salt else b""


def tenant_of_hash(hashed_salt: bytes, secret: bytes = b"") -> bytes:
    """Return ``tenant`` of a salt of which only ``salt_hash`` is known."""
    return hmac.new(secret, sized(TENANT_TAG) + sized(hashed_salt), hashlib.sha256).digest()


def _canonical(value: object, where: str) -> bytes:
    """Return one type letter and the sized content; containers hold the canonical forms of their items."""
    if value is None:
        return b"n" + sized(b"")
    if isinstance(value, bool):  # before int: True is an int
        return b"t" + sized(b"\1" if value else b"\0")
    if isinstance(value, int):
        return b"i" + sized(_integer(value))
    if isinstance(value, float):
        return b"f" + sized(struct.pack("<d", value))
    if isinstance(value, str):
        return b"s" + sized(_utf8(value))
    if isinstance(value, bytes):
        return b"b" + sized(value)
    if isinstance(value, Mapping):
        return b"m" + sized(_canonical_items(value, where))
    if isinstance(value, (list, tuple)):
        items = (_canonical(item, f"{where}[{index}]") for index, item in enumerate(value))
        return b"l" + sized(b"".join(items))
    raise TypeError(f"{where}: a {type(value).__name__} has no canonical form")


def _canonical_items(mapping: Mapping[str, object], where: str) -> bytes:
    for key in mapping:
        if not isinstance(key, str):
            raise TypeError(f"{where}: key {key!r} is a {type(key).__name__}, not a string")
    ordered = sorted(mapping, key=_utf8)
    return b"".join(sized(_utf8(key)) + _canonical(mapping[key], f"{where}.{key}") for key in ordered)


def sized(content: bytes) -> bytes:
    """Return ``content`` preceded by its length, the form of every field of a pre-image."""
    return struct.pack("<Q", len(content)) + content


def _integer(value: int) -> bytes:
    return b"%d" % value


def _utf8(text: str) -> bytes:
    # Users choose salts: a lone surrogate must neither raise nor make two different texts equal.
    return text.encode("utf-8", "surrogatepass")
