"""The reading half that all serdes share."""

from __future__ import annotations

import torch

from lmcache.storage_backend.serde import legacy
from lmcache.storage_backend.serde.cachegen_basics import CacheGenEncoderOutput
from lmcache.storage_backend.serde.container import BadContainer, Kind, is_container, parse, tensor_from_bytes
from lmcache.storage_backend.serde.serde import Deserializer
from lmcache.tiers.header import Buffer


class ContainerDeserializer(Deserializer):
    """Reads every container, whichever serde wrote it, and the legacy bytes of its own serde."""

    @torch.inference_mode(False)
    def from_bytes(self, bs: Buffer, label: bytes = b"") -> torch.Tensor:
        """See Deserializer."""
        return _cast(_read(bs, label) if is_container(bs) else self._read_legacy(bs), self.dtype)

    def _read_legacy(self, bs: Buffer) -> torch.Tensor:
        raise BadContainer("wrong magic: not a container")


def _read(bs: Buffer, label: bytes) -> torch.Tensor:
    kind, dtype, shape, payload = container = parse(bs, label)
    if kind is Kind.RAW:
        return tensor_from_bytes(payload, dtype, shape)
    if kind is Kind.CACHEGEN:
        return CacheGenEncoderOutput.from_container(container).decode()
    tensor = legacy.read_safetensors(payload)
    if tensor.dtype != dtype or tensor.shape != shape:
        raise BadContainer(f"payload is {tensor.dtype} {tuple(tensor.shape)}, not {dtype} {shape}")
    return tensor


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Raises BadContainer rather than let a value be clipped, become infinite or change its meaning."""
    if tensor.dtype == dtype:
        return tensor
    if not (tensor.is_floating_point() and dtype.is_floating_point):
        raise BadContainer(f"{tensor.dtype} is not cast to {dtype}")
    exact, cast = tensor.double(), tensor.to(dtype)
    # Infinity is beyond every maximum, but a dtype that has it keeps it.
    if bool(((exact.abs() > torch.finfo(dtype).max) & (cast.double() != exact)).any()):
        raise BadContainer(f"values are too large for {dtype}")
    return cast
