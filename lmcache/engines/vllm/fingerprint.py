"""What makes KV comparable: the listing that becomes the namespace, fingerprints of weights and adapters."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lmcache.keys import Listed

_SAMPLE_BYTES = 4096
"""Of every tensor: fine-tunes of a model have equal headers and equal sizes."""

_MAX_HEADER_BYTES = 100 << 20
_VOLATILE_CONFIG = {"_name_or_path", "_commit_hash", "transformers_version"}


def weights_fingerprint(model_dir: Path) -> str | None:
    """Fingerprint the safetensors files of a directory; None when there are none or one can't be read.

    Files of a Hugging Face cache are links to blobs that are named by the hash of all their bytes. Else 4 KiB
    of every tensor are read: milliseconds for any model.
    """
    files = sorted(model_dir.glob("*.safetensors"))
    if not files:
        return None
    digest = hashlib.sha256()
    try:
        for file in files:
            name, content = file.name.encode(), _blob_hash(file) or _sampled_hash(file)
            digest.update(struct.pack("<QQ", len(name), len(content)) + name + content)
    except (OSError, ValueError):
        return None
    return digest.hexdigest()


def lora_fingerprint(lora_request: Any) -> bytes | None:
    """Fingerprint the adapter of a request: empty without one, None when it can't be told from others."""
    if lora_request is None:
        return b""
    adapter_dir = Path(lora_request.lora_path or "")
    weights = weights_fingerprint(adapter_dir)
    try:
        config = (adapter_dir / "adapter_config.json").read_bytes()
    except OSError:
        return None
    return hashlib.sha256(weights.encode() + config).digest() if weights else None


def model_dir(model: str, revision: str | None) -> Path:
    """Find where the engine has the model's files. May return a directory that does not exist."""
    if os.path.isdir(model):
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except Exception:  # not installed, not in its cache, not a repository's name: all mean "not found"
        return Path(model)


def private_reason(vllm_config: Any, weights: str | None, has_fixed_hash_seed: bool) -> str:
    """Say why chunk keys mean nothing outside this engine process; empty when they do.

    Of vLLM's hash algorithms only ``sha256_cbor`` is accepted: the pickles that ``sha256`` hashes depend on
    which equal strings are one object, and xxhash is not safe against made collisions.
    """
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm != "sha256_cbor":
        return (
            f"block hashes by {algorithm} can't be reproduced in other processes: "
            "start vLLM with --prefix-caching-hash-algo sha256_cbor"
        )
    if "PYTHONHASHSEED" not in os.environ and not has_fixed_hash_seed:
        return "block hashes are seeded at random: set PYTHONHASHSEED=0"
    if vllm_config.load_config.load_format == "dummy":
        return "the weights are dummies"
    if weights is None:
        return "the weights can't be fingerprinted: no readable safetensors files"
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        return "KV scales are calculated at run time (calculate_kv_scales)"
    return ""


def listing(
    vllm_config: Any, weights: str | None, contents: Iterable[str], grid_tokens: tuple[int, int, int]
) -> dict[str, Listed]:
    """List what makes the bytes of chunks comparable. The engine's version is not in it, see ``layouts``."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    return {
        "weights": weights,
        "config": effective_config(model.hf_config.to_dict(), model.max_model_len),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "contents": sorted(set(contents)),
        "grid": list(grid_tokens),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "hash": cache.prefix_caching_hash_algo,
        "hash_seed": os.environ.get("PYTHONHASHSEED"),
    }


def effective_config(config: Mapping[str, Any], max_model_len: int) -> str:
    """Return the model's configuration as the engine uses it, in canonical JSON."""
    kept: dict[str, Any] = {name: value for name, value in config.items() if name not in _VOLATILE_CONFIG}
    if re.search(r'"(longrope|dynamic|su)"', json.dumps(kept, default=str)):  # K turns by max_model_len
        kept["lmcache.max_model_len"] = max_model_len
    return json.dumps(kept, sort_keys=True, default=str)


def _blob_hash(file: Path) -> bytes | None:
    if not file.is_symlink():
        return None
    blob = Path(os.readlink(file))
    is_hash = re.fullmatch(r"[0-9a-f]{64}", blob.name) and blob.parent.name == "blobs"
    return bytes.fromhex(blob.name) if is_hash else None


def _sampled_hash(file: Path) -> bytes:
    """Hash name, type, shape and first bytes of every tensor. Raises OSError and ValueError."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        (header_bytes,) = struct.unpack("<Q", _read(stream, 8))
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{file} is not a safetensors file")
        header = json.loads(_read(stream, header_bytes))
        header.pop("__metadata__", None)
        for name in sorted(header):
            start, end = header[name]["data_offsets"]
            digest.update(json.dumps([name, header[name]["dtype"], header[name]["shape"]]).encode())
            stream.seek(8 + header_bytes + start)
            digest.update(_read(stream, min(end - start, _SAMPLE_BYTES)))
    return digest.digest()


def _read(stream: Any, num_bytes: int) -> bytes:
    content: bytes = stream.read(num_bytes)
    if len(content) != num_bytes:
        raise ValueError("the file ends too early")
    return content
