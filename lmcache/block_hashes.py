"""vLLM's hashes of a prompt's blocks, derived without vLLM. Pure.

vLLM 0.29-0.33 hashes ``(hash of the block before, token ids, extra keys)`` with ``sha256_cbor``: SHA-256 of
the canonical CBOR form (RFC 8949). The engine proves at its start that this module computes the same hashes
(``lmcache.engines.vllm.hashes``), and otherwise sends no root.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Union

ALGORITHM = "sha256_cbor"
"""vLLM's name of the only algorithm that other processes can reproduce."""

MAX_TOKEN = (1 << 32) - 1

Encodable = Union[None, int, str, bytes, "tuple[Encodable, ...]"]

_INTEGER, _BYTES, _TEXT, _ARRAY = 0x00, 0x40, 0x60, 0x80
_NONE = b"\xf6"
_SIZES = ((1 << 8, 24, ">B"), (1 << 16, 25, ">H"), (1 << 32, 26, ">I"), (1 << 64, 27, ">Q"))


class ExtraKeys(NamedTuple):
    """Values that block hashes cover apart from tokens."""

    cache_salt: str = ""
    lora_name: str = ""
    lora_path: str = ""

    def of_block(self, is_first: bool, is_tagged: bool) -> tuple[Encodable, ...] | None:
        """Return the extra keys of a block. ``is_tagged``: see ``block_hashes``."""
        keys: list[Encodable] = []
        if self.lora_name:
            keys.append(("lora", self.lora_name, self.lora_path) if is_tagged else self.lora_name)
        if self.cache_salt and is_first:
            keys.append(("cache_salt", self.cache_salt) if is_tagged else self.cache_salt)
        return tuple(keys) or None


NO_EXTRA_KEYS = ExtraKeys()


def root_of(seed: str) -> bytes:
    """Return the hash before the first block, from the seed that vLLM uses (PYTHONHASHSEED)."""
    return hashlib.sha256(encode(seed)).digest()


def block_hashes(
    tokens: Sequence[int],
    block_tokens: int,
    root: bytes,
    extra: ExtraKeys = NO_EXTRA_KEYS,
    *,
    is_tagged: bool = True,
) -> Iterator[bytes]:
    """Yield the hash of each full block, head first.

    ``is_tagged``: extra keys are pairs with their kind, as in vLLM 0.30 and later. ``root``: see ``root_of``.
    Raises ValueError for a token id that is out of range.
    """
    first_keys, later_keys = (encode(extra.of_block(is_first, is_tagged)) for is_first in (True, False))
    before, between = _head(_ARRAY, 3) + _head(_BYTES, len(root)), _head(_ARRAY, block_tokens)
    encoded, parent, keys = _EncodedTokens(), root, first_keys
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        block = b"".join([encoded[token] for token in tokens[end - block_tokens : end]])
        parent = hashlib.sha256(before + parent + between + block + keys).digest()
        yield parent
        keys = later_keys


class _EncodedTokens(dict[int, bytes]):
    """Encoded token ids: most ids occur again in a prompt."""

    def __missing__(self, token: int) -> bytes:
        if not 0 <= token <= MAX_TOKEN:
            raise ValueError(f"token id {token} is not a number from 0 to {MAX_TOKEN}")
        encoded = self[token] = encode(token)
        return encoded


def encode(value: Encodable) -> bytes:
    """Return the canonical CBOR form of a value."""
    if value is None:
        return _NONE
    if isinstance(value, int):
        return _head(_INTEGER, value)
    if isinstance(value, bytes):
        return _head(_BYTES, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(_TEXT, len(text)) + text
    return b"".join(itertools.chain([_head(_ARRAY, len(value))], map(encode, value)))


def _head(kind: int, number: int) -> bytes:
    """Return the first bytes of a value: its kind, and an unsigned number in its shortest form."""
    if 0 <= number < 24:
        return bytes([kind | number])
    _, code, form = next(size for size in _SIZES if number < size[0])
    return bytes([kind | code]) + struct.pack(form, number)
