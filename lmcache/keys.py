"""Names of things: chunk keys, namespaces, tenants. Pure, and the same in every process and on every machine.

Every digest here is SHA-256 (or HMAC-SHA-256) of a *pre-image* that starts with a tag of what it names and
its version, and in which every field has its length in front: two different inputs never make the same
pre-image. A change of any byte of a pre-image orphans every object stored so far; the golden tests notice it.
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
TENANT_TAG = b"lmcache tenant 1"
MEDIA_TAG = b"lmcache media 1"

Listed = Union[None, bool, int, float, str, bytes, "Sequence[Listed]", "Mapping[str, Listed]"]
"""What a namespace may be made of."""


def chunk_key(
    block_hash: bytes, lora_fingerprint: bytes = b"", cache_salt: str = "", group: int = 0
) -> bytes:
    """Name one chunk (32 bytes).

    ``block_hash`` is the engine's hash of the chunk's last block: it folds in all tokens before it. LoRA and
    salt are named again because engines fold them into their own hash untagged, so that one can pose as the
    other.
    """
    return _chunk_key(block_hash, _qualifiers(lora_fingerprint, cache_salt, group))


def chunk_keys(
    block_hashes: Iterable[bytes], lora_fingerprint: bytes = b"", cache_salt: str = "", group: int = 0
) -> list[bytes]:
    """Make the keys of many chunks, each as ``chunk_key`` does: a prompt has hundreds.

    Those made last are remembered: a prompt begins as others did, and a conversation as its last turn.
    """
    qualifiers = _qualifiers(lora_fingerprint, cache_salt, group)
    return list(map(_chunk_key, block_hashes, itertools.repeat(qualifiers)))


@functools.lru_cache(8192)  # some 3 MB
def _chunk_key(block_hash: bytes, qualifiers: bytes) -> bytes:
    return hashlib.sha256(sized(CHUNK_TAG) + sized(block_hash) + qualifiers).digest()


def _qualifiers(lora_fingerprint: bytes, cache_salt: str, group: int) -> bytes:
    """What a chunk's key holds beside its hash, as in the pre-image."""
    return b"".join(map(sized, (lora_fingerprint, _utf8(cache_salt), _integer(group))))


def media_fingerprint(lora_fingerprint: bytes, media: Sequence[bytes]) -> bytes:
    """Stand in for the LoRA fingerprint in keys of chunks that depend on ``media`` too (digests)."""
    return hashlib.sha256(b"".join(map(sized, (MEDIA_TAG, lora_fingerprint, *media)))).digest()


def namespace(listing: Mapping[str, Listed]) -> bytes:
    """Name the set of all chunks whose bytes are comparable (32 bytes).

    ``listing`` is everything that makes them so: weights, effective model config, KV dtype, layout, geometry,
    sizes, hash algorithm. Order of keys does not matter; types do (1, 1.0, True and "1" differ);
    sequences of one content are equal.
    Raises TypeError for a value, and for a key, of a type that has no canonical form, naming where it stands.
    """
    return hashlib.sha256(sized(NAMESPACE_TAG) + _canonical(listing, "listing")).digest()


def tenant(cache_salt: str, secret: bytes = b"") -> bytes:
    """Return an opaque, stable name of a cache salt for quotas and metrics; empty when there is no salt.

    Without a ``secret`` it hides the salt from a glance, not from somebody who can guess salts.
    """
    if not cache_salt:
        return b""
    return hmac.new(secret, sized(TENANT_TAG) + _utf8(cache_salt), hashlib.sha256).digest()


def _canonical(value: object, where: str) -> bytes:
    """One type letter, then the sized content; containers hold the canonical forms of what is in them."""
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
    """Put its length in front, as in every pre-image."""
    return struct.pack("<Q", len(content)) + content


def _integer(value: int) -> bytes:
    return b"%d" % value


def _utf8(text: str) -> bytes:
    # Users choose salts: a lone surrogate must not raise, nor fall together with another text.
    return text.encode("utf-8", "surrogatepass")
