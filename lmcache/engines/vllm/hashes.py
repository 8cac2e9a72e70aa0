"""Tells the sidecar how this engine hashes blocks, after a comparison with the engine's own functions."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from lmcache import block_hashes
from lmcache.block_hashes import ExtraKeys
from lmcache.rpc.hello import BlockHashes

logger = logging.getLogger(__name__)

_EXAMPLES = (
    ExtraKeys(),
    ExtraKeys("sält"),
    ExtraKeys("salt", "adapter", "/adapters/1"),
)


def hashes_of_engine(algorithm: str, block_tokens: int) -> BlockHashes:
    """Return how the engine hashes blocks of ``block_tokens`` tokens.

    Without a root, no other process can compute these hashes. With a root, ``lmcache.block_hashes`` computes
    the same hashes as this vLLM. It was compared for all kinds of extra keys except media.
    """
    unknown = BlockHashes(algorithm, block_tokens=block_tokens)
    if algorithm != block_hashes.ALGORITHM:
        return unknown
    try:
        return _proven(algorithm, block_tokens) or unknown
    except Exception as error:  # another version of vLLM: the cache works, only one command does not
        logger.debug("The engine's block hashes can't be reproduced: %r", error)
        return unknown


def _proven(algorithm: str, block_tokens: int) -> BlockHashes | None:
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hash_function = get_hash_fn_by_name(algorithm)
    seed = kv_cache_utils.resolve_none_hash_seed(hash_function)
    root = block_hashes.root_of(seed)
    if root != hash_function(seed):
        return None
    tokens = [number * 7919 for number in range(2 * block_tokens)]
    for is_tagged in (True, False):
        if all(
            list(block_hashes.block_hashes(tokens, block_tokens, root, extra, is_tagged=is_tagged))
            == _engines_hashes(kv_cache_utils, hash_function, root, tokens, block_tokens, extra)
            for extra in _EXAMPLES
        ):
            return BlockHashes(algorithm, root, block_tokens, is_tagged)
    return None


def _engines_hashes(
    kv_cache_utils: Any,
    hash_function: Any,
    root: bytes,
    tokens: list[int],
    block_tokens: int,
    extra: ExtraKeys,
) -> list[bytes]:
    """Return the hashes of blocks as vLLM computes them for a request."""
    lora = SimpleNamespace(lora_name=extra.lora_name, lora_path=extra.lora_path) if extra.lora_name else None
    request = SimpleNamespace(
        lora_request=lora, mm_features=[], cache_salt=extra.cache_salt or None, prompt_embeds=None
    )
    hashes, parent = [], root
    for start in range(0, len(tokens), block_tokens):
        end = start + block_tokens
        keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
        parent = kv_cache_utils.hash_block_tokens(hash_function, parent, tokens[start:end], keys)
        hashes.append(bytes(parent))
    return hashes
