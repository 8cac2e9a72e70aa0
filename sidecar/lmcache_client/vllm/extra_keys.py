"""Identifies what a request's KV depends on apart from its tokens and the model: LoRA adapter and media.

The engine's block hashes include the name and path of the adapter, and an identifier of each image, which a
client may choose or a counter may assign. This module identifies both by their content, if the engine has it.
Block hashes also include the rows of prompt embeddings, but not which positions have embeddings.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import time
import weakref
from collections.abc import Iterator
from concurrent import futures
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lmcache_client.core import files
from lmcache_client.core.requests import ExtraKeys, FindExtraKeys
from lmcache_client.errors import UnnamedError
from lmcache_store import keys
from lmcache_store.common.recent import Recent

logger = logging.getLogger(__name__)

_MAX_IDENTIFIERS = 1 << 16
"""Media identifiers to remember: far more than the outputs that the engine's media encoder caches."""

_CLOCK_SECONDS = 0.01
"""Largest delay of the clock with which the kernel stamps changes of files."""

_OPTIONS = (
    "target_modules",
    "lora_dtype",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""vLLM's options that determine what it computes with the files of an adapter."""

_COUNTED = re.compile(r"renderer\d+-mm-\d+-")
"""Identifiers of media that vLLM does not hash. They never occur twice, so storing such chunks is useless."""


class _Load(NamedTuple):
    """The first load of an adapter's folder."""

    began: float
    """Earliest time at which the engine read the files."""
    state: list[tuple[int, int, int]]
    """State of the files just before that."""


class ExtraKeyFinder:
    """Finds the extra keys of requests. Only one thread may call what ``extra_keys_of`` returns."""

    def __init__(self, began: float | None = None, lora_config: Any = None) -> None:
        """``began``: earliest time at which the engine loads an adapter; by default the process's start.
        ``lora_config``: vLLM's options for adapters."""
        self._options = [str(getattr(lora_config, name, None)) for name in _OPTIONS]
        self._began = files.process_start_time() if began is None else began
        self._adapters: dict[Path, futures.Future[bytes]] = {}  # fingerprints by folder
        # Loads while the engine runs, by folder. None: requests came first, so an earlier load is possible.
        self._loads: dict[Path, _Load | None] = {}
        self._folders: dict[int, Path] = {}  # by the engine's number of the adapter
        self._replaced: set[int | Path] = set()  # numbers loaded in place, and their folders
        self._media: dict[int, bytes] = {}  # id() of the engine's live media items -> digest
        # Digests by identifier; None: two contents had this identifier, so the engine may mix them up.
        self._identifiers: Recent[str, bytes | None] = Recent(_MAX_IDENTIFIERS)

    def extra_keys_of(self, request: Any, chunk_tokens: int) -> FindExtraKeys | None:
        """Return a function that finds the request's extra keys; None if it has none."""
        if request.lora_request is not None:
            self._loads.setdefault(_folder(request.lora_request), None)
        has_any = (
            request.lora_request is not None
            or getattr(request, "mm_features", None)
            or getattr(request, "prompt_embeds", None) is not None
        )
        return partial(self.extra_keys, request, chunk_tokens) if has_any else None

    def note_load(self, adapter: Any) -> bool:
        """Record that the engine is about to load an adapter. Returns whether it may replace another one.

        The engine may load the adapter again later, and its own prefix cache knows adapters by name and path.
        Therefore only the first load of a folder counts, and the folder must not change after it.
        """
        path, number = _folder(adapter), adapter.lora_int_id
        if is_in_place := bool(getattr(adapter, "load_inplace", False)):
            # Running requests of both adapters may continue with either one, and the engine caches their KV.
            self._replaced |= {number, path, self._folders.get(number, path)}
        self._folders[number] = path
        if path not in self._loads:
            with contextlib.suppress(OSError):  # the engine will fail to load it, or download it
                self._loads[path] = _Load(time.time() - _CLOCK_SECONDS, files.adapter_state(path))
        return is_in_place

    def extra_keys(self, request: Any, chunk_tokens: int) -> ExtraKeys:
        """Return the extra keys of the request's chunks.

        Raises UnnamedError if the request can't be cached, or not yet.
        """
        lora = b""
        if (adapter := request.lora_request) is not None:
            try:
                lora = self._adapter(adapter)
            except (OSError, UnnamedError) as error:
                message = f"adapter {adapter.lora_name:.100} can't be identified: {error}"
                raise UnnamedError(message) from error
        named = _embedded_places(request, chunk_tokens)
        for feature in getattr(request, "mm_features", None) or ():
            digest = self._medium(feature)
            if digest is None:
                raise UnnamedError(f"a medium ({feature.modality}) can't be identified by its content")
            named.append((feature.mm_position.offset // chunk_tokens, digest))
        named.sort(key=lambda item: item[0])
        digests = [digest for _, digest in named]
        media = ((chunk, keys.media_fingerprint(lora, digests[:n])) for n, (chunk, _) in enumerate(named, 1))
        return (*([(0, lora)] if lora else ()), *media)

    def _adapter(self, adapter: Any) -> bytes:
        """Return the fingerprint of an adapter. Raises UnnamedError or OSError."""
        if getattr(adapter, "tensorizer_config_dict", None):
            raise UnnamedError("it is not loaded from lora_path")
        path = _folder(adapter)
        if self._replaced & {adapter.lora_int_id, path}:
            raise UnnamedError("it was loaded in place, so the engine may mix old and new weights")
        if not path.is_dir():
            raise UnnamedError(f"{path} is no folder, and the content of a repository may change")
        load = self._loads.get(path)
        began = load.began if load is not None else self._began
        future = self._adapters.get(path)
        if future is None:
            future = self._adapters[path] = files.in_background(_adapter_fingerprint, path, began)
        if not future.done():
            raise UnnamedError("its files are being hashed")
        for file in files.adapter_files(path):
            files.check_unchanged(file, began)
        if load is not None and files.adapter_state(path) != load.state:
            raise UnnamedError(f"{path} changed after the engine loaded it")
        options = json.dumps([*self._options, bool(getattr(adapter, "is_3d_lora_weight", False))])
        return hashlib.sha256(future.result() + options.encode()).digest()

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
        # The engine caches its encoder's outputs by identifier, so two contents must not share one.
        if self._identifiers.setdefault(feature.identifier, digest) != digest:
            self._identifiers[feature.identifier] = digest = None
        return digest


def _folder(adapter: Any) -> Path:
    return Path(adapter.lora_path or "").expanduser()


def _adapter_fingerprint(path: Path, began: float) -> bytes:
    try:
        if not (path / "adapter_model.safetensors").is_file():
            raise UnnamedError(f"vLLM loads no safetensors file in {path}")
        return files.adapter_fingerprint(path, began)
    except (OSError, UnnamedError) as error:
        logger.warning("Requests with the adapter at %s are not cached: %s", path, error)
        raise


def _embedded_places(request: Any, chunk_tokens: int) -> list[tuple[int, bytes]]:
    """Return (chunk, digest of the positions of embeddings) for each chunk that has any.

    The engine's block hash covers embeddings, with zeros in place of tokens, and tokens, with 0 in place of
    embeddings. So it can't distinguish an embedding of zeros from token 0.
    """
    if getattr(request, "prompt_embeds", None) is None:
        return []
    is_token = getattr(request, "prompt_is_token_ids", None) or [False] * request.num_prompt_tokens
    places = []
    for start in range(0, len(is_token), chunk_tokens):
        mask = bytes(is_token[start : start + chunk_tokens])
        if 0 in mask:  # the positions after the prompt have tokens, hence the padding with 1
            digest = hashlib.sha256(keys.sized(b"places of embeddings") + mask.ljust(chunk_tokens, b"\1"))
            places.append((start // chunk_tokens, digest.digest()))
    return places


def _item_digest(feature: Any) -> bytes:
    """Hash the processed data of an image, a video or a sound. Raises TypeError for unknown types of data."""
    digest = hashlib.sha256(keys.sized(feature.modality.encode()))
    data = feature.data.get_data()
    for name in sorted(data):
        digest.update(keys.sized(name.encode()))
        for part in _parts(data[name]):
            digest.update(part)
    return digest.digest()


def _parts(value: Any) -> Iterator[Any]:
    """Yield nested lists of tensors and numbers as bytes, so that different values have different bytes."""
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
        raise TypeError(f"media data of type {type(value).__name__} can't be hashed")
