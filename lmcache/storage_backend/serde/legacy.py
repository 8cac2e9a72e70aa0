"""Readers of the formats that LMCache 0.1-0.3 wrote. This version does not write them.

The bytes come from the network. Every mistake in them is a ContainerError, and no code in them runs.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile

import safetensors.torch
import torch

from lmcache.storage_backend.serde.container import ContainerError
from lmcache_store.tiers.header import Buffer

TENSOR_NAME = "tensor_bytes"
"""Name of the one tensor in a safetensors payload."""

# Names that torch.save of one tensor uses. torch.load(weights_only=True) alone allows more, for example
# bytearray(10**12).
_TENSOR_GLOBALS = re.compile(
    r"torch(\.storage)? \w+Storage|torch (float|bfloat|u?int)\w+|torch\._utils _rebuild_tensor_v[23]"
    r"|collections OrderedDict"
)


def read_safetensors(blob: Buffer) -> torch.Tensor:
    """Read a safetensors file with one tensor, "tensor_bytes". Raises ContainerError."""
    try:
        tensors = safetensors.torch.load(bytes(blob))
        return tensors[TENSOR_NAME]
    except Exception as error:  # the parser's errors have no common base class
        raise ContainerError(f"not a safetensors file with {TENSOR_NAME}: {error}") from error


def read_torch(blob: Buffer) -> torch.Tensor:
    """Read a file of ``torch.save(tensor)``.

    Raises ContainerError for any content except one dense tensor.
    """
    file = io.BytesIO(blob)
    try:
        _check_archive(file, len(blob))
        tensor = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # the parsers' errors have no common base class
        raise ContainerError(f"not a tensor written by torch.save: {error}") from error
    # With strides of 0, a few bytes could claim to be a tensor of any size.
    if not isinstance(tensor, torch.Tensor) or tensor.numel() * tensor.itemsize > len(blob):
        raise ContainerError("not a dense tensor written by torch.save")
    return tensor.detach().clone()


def _check_archive(file: io.BytesIO, length: int) -> None:
    """Raise ValueError if reading would need more memory than the bytes, or create other objects."""
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("an entry is compressed, which torch.save does not do")
        if sum(entry.file_size for entry in entries) > length:
            raise ValueError("entries overlap")
        (program,) = (entry for entry in entries if entry.filename.endswith("/data.pkl"))
        for opcode, argument, _ in pickletools.genops(archive.read(program)):
            is_name = opcode.name in ("GLOBAL", "INST", "STACK_GLOBAL")
            if is_name and not _TENSOR_GLOBALS.fullmatch(str(argument)):
                raise ValueError(f"it refers to {argument}, which is not part of a tensor")
    file.seek(0)
