"""What the KV of a request depends on beside its tokens and the model: its LoRA adapter and its media.

The engine's block hashes hold a name and a path of the adapter and an identifier of each image, which a
client may have chosen or a counter made. Here both are named by their content, as far as the engine has it.
They hold the rows of embeddings too, but not which places have any.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import weakref
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lmcache import keys
from lmcache.engines.core.requests import ExtraKeys, FindExtraKeys
from lmcache.engines.errors import UnnamedError
from lmcache.engines.vllm import files
from lmcache.recent import Recent

logger = logging.getLogger(__name__)

_MAX_IDENTIFIERS = 1 << 16
"""Remembered; far more than the engine keeps outputs of its media encoder."""

_COUNTED = re.compile(r"renderer\d+-mm-\d+-")
"""How vLLM calls media that it does not hash. Never the same again: storing such chunks is of no use."""


class ExtraKeyFinder:
    """Finds the extra keys of requests. One thread calls what ``extra_keys_of`` returns."""

    def __init__(self, began: float | None = None) -> None:
        """``began``: when the engine could load the first adapter; by default when this process began."""
        self._began = files.process_began() if began is None else began
        self._adapters: dict[str, futures.Future[bytes | None]] = {}
        self._media: dict[int, bytes] = {}  # id of an item of the engine's -> digest, as long as it lives
        # By identifier; None: the engine may mix up two contents.
        self._identifiers: Recent[str, bytes | None] = Recent(_MAX_IDENTIFIERS)

    def extra_keys_of(self, request: Any, chunk_tokens: int) -> FindExtraKeys | None:
        """Return what finds the request's extra keys; None: it has none."""
        has_any = (
            request.lora_request is not None
            or getattr(request, "mm_features", None)
            or getattr(request, "prompt_embeds", None) is not None
        )
        return partial(self.extra_keys, request, chunk_tokens) if has_any else None

    def extra_keys(self, request: Any, chunk_tokens: int) -> ExtraKeys | None:
        """Return what the request's chunks depend on; None: don't cache it, or not yet."""
        lora = self._adapter(request.lora_request)
        if lora is None:
            return None
        named = _embedded_places(request, chunk_tokens)
        for feature in getattr(request, "mm_features", None) or ():
            digest = self._medium(feature)
            if digest is None:
                return None
            named.append((feature.mm_position.offset // chunk_tokens, digest))
        named.sort(key=lambda item: item[0])
        digests = [digest for _, digest in named]
        media = ((at, keys.media_fingerprint(lora, digests[:n])) for n, (at, _) in enumerate(named, 1))
        return (*([(0, lora)] if lora else ()), *media)

    def _adapter(self, lora_request: Any) -> bytes | None:
        if lora_request is None:
            return b""
        if getattr(lora_request, "tensorizer_config_dict", None):
            return None  # it is loaded from elsewhere
        path = Path(lora_request.lora_path or "")
        known = self._adapters.get(str(path))
        if known is None:
            known = self._adapters[str(path)] = files.in_background(_adapter_fingerprint, path, self._began)
        if not known.done():
            return None
        try:
            for file in _adapter_files(path):
                files.check_unchanged(file, self._began)
        except (OSError, UnnamedError):
            return None
        return known.result()

    def _medium(self, feature: Any) -> bytes | None:
        if feature.data is None or _COUNTED.match(feature.identifier):
            return None
        digest = self._media.get(id(feature.data))
        if digest is None:
            try:
                digest = _item_digest(feature)
            except TypeError as error:
                logger.debug("A request is not cached: %s", error)
                return None
            self._media[id(feature.data)] = digest
            weakref.finalize(feature.data, self._media.pop, id(feature.data), None)
        # The engine keeps its encoder's outputs by identifier: under one it has to be one content.
        if self._identifiers.setdefault(feature.identifier, digest) != digest:
            self._identifiers[feature.identifier] = digest = None
        return digest


def _adapter_files(path: Path) -> list[Path]:
    return [path / "adapter_config.json", *sorted(path.glob("*.safetensors"))]


def _adapter_fingerprint(path: Path, began: float) -> bytes | None:
    try:
        config = (path / "adapter_config.json").read_bytes()
        return hashlib.sha256(files.fingerprint(path, began).encode() + config).digest()
    except (OSError, UnnamedError) as error:
        logger.warning("Requests with the adapter at %s are not cached: %s", path, error)
        return None


def _embedded_places(request: Any, chunk_tokens: int) -> list[tuple[int, bytes]]:
    """For each chunk with embeddings instead of tokens, the digest of where they are in it.

    The engine's block hash holds the rows, zeros where there are tokens, and the tokens, 0 where there are
    rows: it is one for rows of zeros and for the token 0.
    """
    if getattr(request, "prompt_embeds", None) is None:
        return []
    is_token = getattr(request, "prompt_is_token_ids", None) or [False] * request.num_prompt_tokens
    found = []
    for start in range(0, len(is_token), chunk_tokens):
        mask = bytes(is_token[start : start + chunk_tokens])
        if 0 in mask:  # behind the prompt there are tokens
            digest = hashlib.sha256(keys.sized(b"places of embeddings") + mask.ljust(chunk_tokens, b"\1"))
            found.append((start // chunk_tokens, digest.digest()))
    return found


def _item_digest(feature: Any) -> bytes:
    """Digest the processed data of an image, a video or a sound. Raises TypeError for what it can't read."""
    digest = hashlib.sha256(keys.sized(feature.modality.encode()))
    data = feature.data.get_data()
    for name in sorted(data):
        digest.update(keys.sized(name.encode()))
        for part in _parts(data[name]):
            digest.update(part)
    return digest.digest()


def _parts(value: Any) -> Iterator[Any]:
    """Nested lists of tensors and numbers as bytes, injectively."""
    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        content = value.detach().contiguous().view(-1).view(torch.uint8).numpy()
        yield keys.sized(f"{value.dtype} {tuple(value.shape)}".encode())
        yield content.data
    elif isinstance(value, (list, tuple)):
        yield keys.sized(b"list %d" % len(value))
        for item in value:
            yield from _parts(item)
    elif isinstance(value, (bool, int, float, str)):
        yield keys.sized(json.dumps([type(value).__name__, value]).encode())
    else:
        raise TypeError(f"media data of type {type(value).__name__} can't be named by its content")
