"""Readers of what lmcache 0.1 to 0.3 wrote. Nothing writes these formats any more.

The bytes come from the network: whatever is wrong with them is a ContainerError, and no code in them runs.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile

import safetensors.torch
import torch

from lmcache.storage_backend.serde.container import ContainerError
from lmcache.tiers.header import Buffer

TENSOR_NAME = "tensor_bytes"
"""Name of the one tensor in a safetensors payload."""

# What torch.save of one tensor refers to. torch.load(weights_only=True) allows more: bytearray(10**12), say.
_TENSOR_GLOBALS = re.compile(
    r"torch(\.storage)? \w+Storage|torch (float|bfloat|u?int)\w+|torch\._utils _rebuild_tensor_v[23]"
    r"|collections OrderedDict"
)


def read_safetensors(blob: Buffer) -> torch.Tensor:
    """Read ``{"tensor_bytes": tensor}``. Raises ContainerError."""
    try:
        tensors = safetensors.torch.load(bytes(blob))
        return tensors[TENSOR_NAME]
    except Exception as error:  # the parser's errors have no class in common
        raise ContainerError(f"not a safetensors file with {TENSOR_NAME}: {error}") from error


def read_torch(blob: Buffer) -> torch.Tensor:
    """Read what ``torch.save(tensor)`` wrote. Raises ContainerError, also for anything but one dense
    tensor."""
    file = io.BytesIO(blob)
    try:
        _check_archive(file, len(blob))
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the parsers' errors have no class in common
        raise ContainerError(f"not a tensor written by torch.save: {error}") from error
    # Strides of 0 make a few bytes a tensor of any size.
    if not isinstance(tensor, torch.Tensor) or tensor.numel() * tensor.itemsize > len(blob):
        raise ContainerError("not a dense tensor written by torch.save")
    return tensor.detach().clone()


def _check_archive(file: io.BytesIO, length: int) -> None:
    """Raise ValueError unless reading the archive takes no more memory than its bytes, and makes a tensor."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("torch.save does not compress")
        if sum(entry.file_size for entry in entries) > length:
            raise ValueError("parts overlap")
        (program,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
        for opcode, argument, _ in pickletools.genops(archive.read(program)):
            is_name = opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL")
            if is_name and not _TENSOR_GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"{argument} is no part of a tensor")
    file.seek(0)
