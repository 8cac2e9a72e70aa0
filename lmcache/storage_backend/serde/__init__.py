"""Serdes: tensors to bytes for a remote store, and back. ``CreateSerde`` makes the two halves of one."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.config import GlobalConfig, LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde.cachegen_decoder import CacheGenDeserializer
from lmcache.storage_backend.serde.cachegen_encoder import CacheGenSerializer
from lmcache.storage_backend.serde.container import BadContainer
from lmcache.storage_backend.serde.fast_serde import FastDeserializer, FastSerializer
from lmcache.storage_backend.serde.safe_serde import SafeDeserializer, SafeSerializer
from lmcache.storage_backend.serde.serde import (
    Deserializer,
    DeserializerDebugWrapper,
    Serializer,
    SerializerDebugWrapper,
)
from lmcache.storage_backend.serde.torch_serde import TorchDeserializer, TorchSerializer

__all__ = ["BadContainer", "CreateSerde", "Deserializer", "Serializer"]


def CreateSerde(
    serde_type: str, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata
) -> tuple[Serializer, Deserializer]:
    """Make the two halves of the serde "torch", "safetensor", "cachegen" or "fast".

    Tensors come back as ``metadata.kv_dtype``. Raises ValueError for any other name.
    """
    dtype = metadata.kv_dtype
    makers: dict[str, Callable[[], tuple[Serializer, Deserializer]]] = {
        "torch": lambda: (TorchSerializer(), TorchDeserializer(dtype)),
        "safetensor": lambda: (SafeSerializer(), SafeDeserializer(dtype)),
        "cachegen": lambda: (
            CacheGenSerializer(config, metadata),
            CacheGenDeserializer(config, metadata, dtype),
        ),
        "fast": lambda: (FastSerializer(), FastDeserializer(dtype)),
    }
    if serde_type not in makers:
        raise ValueError(f"Invalid serde type: {serde_type!r} (write {', '.join(makers)})")
    serializer, deserializer = makers[serde_type]()
    if GlobalConfig.is_debug():
        return SerializerDebugWrapper(serializer), DeserializerDebugWrapper(deserializer)
    return serializer, deserializer
