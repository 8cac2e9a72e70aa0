"""Serdes: tensors to bytes for a remote store, and back. ``CreateSerde`` makes the two halves of one."""

from __future__ import annotations

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
    serializer: Serializer
    deserializer: Deserializer
    dtype = metadata.kv_dtype
    if serde_type == "torch":
        serializer, deserializer = TorchSerializer(), TorchDeserializer(dtype)
    elif serde_type == "safetensor":
        serializer, deserializer = SafeSerializer(), SafeDeserializer(dtype)
    elif serde_type == "cachegen":
        serializer = CacheGenSerializer(config, metadata)
        deserializer = CacheGenDeserializer(config, metadata, dtype)
    elif serde_type == "fast":
        serializer, deserializer = FastSerializer(), FastDeserializer(dtype)
    else:
        raise ValueError(f"Invalid serde type: {serde_type!r} (write torch, safetensor, cachegen or fast)")
    if GlobalConfig.is_debug():
        return SerializerDebugWrapper(serializer), DeserializerDebugWrapper(deserializer)
    return serializer, deserializer
