"""Serdes: conversion of tensors to bytes for a remote store, and back."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde import formats
from lmcache.storage_backend.serde.container import ContainerError
from lmcache.storage_backend.serde.serde import Deserializer, Serializer

__all__ = ["ContainerError", "CreateSerde", "Deserializer", "Serializer"]

_SERIALIZERS: dict[str, Callable[[LMCacheEngineConfig, LMCacheEngineMetadata], Serializer]] = {
    "torch": lambda *_: formats.RawSerializer(),
    "safetensor": lambda *_: formats.SafetensorsSerializer(),
    "cachegen": formats.CacheGenSerializer,
    "fast": lambda *_: formats.RawSerializer(),
}


def CreateSerde(
    serde_type: str, config: LMCacheEngineConfig, metadata: LMCacheEngineMetadata
) -> tuple[Serializer, Deserializer]:
    """Create serializer and deserializer of the serde "torch", "safetensor", "cachegen" or "fast".

    The deserializer returns tensors of ``metadata.kv_dtype``. Raises ValueError for any other name.
    """
    if serde_type not in _SERIALIZERS:
        raise ValueError(f"Invalid serde type: {serde_type!r} (write {', '.join(_SERIALIZERS)})")
    return _SERIALIZERS[serde_type](config, metadata), formats.ContainerDeserializer(metadata.kv_dtype)
