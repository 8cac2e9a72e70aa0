"""Lists everything that makes KV of SGLang comparable. The namespace is a hash of this listing.

SGLang names a page by a hash over the tokens up to its end, the request's cache salt and its extra key, which
contains the id of the LoRA adapter (see ``adapters``). The namespace covers what the hash does not.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lmcache_client.core import files
from lmcache_client.errors import UnnamedError
from lmcache_store.keys import Listed

_FILE_FORMATS = {"auto", "safetensors", "instanttensor", "bitsandbytes", "layered", "presharded"}
"""Values of ``load_format`` that read the safetensors files of the model's folder."""

_OTHER_SOURCES = (
    ("custom_weight_loader", "loads weights by a program"),
    ("decrypted_config_file", "decrypts the model"),
    ("modelopt_checkpoint_restore_path", "restores weights from another file"),
    ("modelopt_quant", "quantizes the weights at the start"),
    ("quantize_and_serve", "quantizes the weights at the start"),
    ("rl_quant_profile", "quantizes the weights by a profile"),
    ("remote_instance_weight_loader_seed_instance_ip", "loads weights from another engine"),
    ("checkpoint_engine_wait_weights_before_ready", "waits for weights from a checkpoint engine"),
    ("delete_ckpt_after_loading", "deletes the files of the weights"),
    ("kt_weight_path", "loads the weights of experts from other files"),
    ("uno_lora_path", "loads an adapter for drafts"),
    ("forward_hooks", "runs programs between the model's layers"),
)
"""Options with which the KV does not follow from the model's files, and what each option does."""


def private_reason(server_args: Any, *, is_from_start: bool) -> str:
    """Return why KV of this engine can't be shared, apart from unknown files; empty if it can.

    ``is_from_start``: the engine's start loaded the backend, so that no weight update was missed.
    """
    if not is_from_start:
        return "the cache was attached to a running engine, whose weights may have changed before"
    for option, effect in _OTHER_SOURCES:
        if getattr(server_args, option, None):
            return f"the option {option} {effect}"
    if getattr(server_args, "weight_cache_mode", "off") != "off":
        return "the option weight_cache_mode loads weights from another process"
    return ""


def weights_fingerprint(server_args: Any, began: float) -> str:
    """Hash the weights that the engine loaded since ``began`` (Unix time). May read all of them.

    Raises UnnamedError if the weights can't be identified.
    """
    load_format = str(server_args.load_format)
    if load_format not in _FILE_FORMATS:
        raise UnnamedError(f"load format {load_format} does not read the model's safetensors files")
    return files.fingerprint(model_dir(server_args), began)


def draft_fingerprint(server_args: Any, began: float) -> str:
    """Hash the weights of the model that drafts tokens, whose KV may be part of a page; empty without one.

    Raises UnnamedError.
    """
    path = getattr(server_args, "speculative_draft_model_path", None)
    if not path or path == server_args.model_path:
        return ""
    revision = getattr(server_args, "speculative_draft_model_revision", None)
    return files.fingerprint(files.model_dir(path, revision, server_args.download_dir), began)


def model_dir(server_args: Any) -> Path:
    """Return the directory of the model's files, which may not exist."""
    return files.model_dir(server_args.model_path, server_args.revision, server_args.download_dir)


def model_config(server_args: Any, began: float) -> dict[str, Any]:
    """Return the model's configuration, with the user's changes. Raises UnnamedError."""
    path = model_dir(server_args) / "config.json"
    try:
        content = path.read_bytes()
        if not files.is_named_by_content(path, content):
            files.check_unchanged(path, began)
        config: dict[str, Any] = json.loads(content)
        config.update(json.loads(server_args.json_model_override_args or "{}"))
    except (OSError, ValueError, TypeError) as error:
        raise UnnamedError(f"the model's configuration {path} can't be read: {error}") from error
    return config


def adapters(server_args: Any, began: float) -> list[list[str]]:
    """Identify the LoRA adapters given at the start, whose ids SGLang derives from name and path only.

    Adapters that are loaded later have random ids. Raises UnnamedError or OSError.
    """
    found = []
    for adapter in server_args.lora_paths or ():
        content = files.adapter_fingerprint(Path(adapter.lora_path), began)
        found.append([str(adapter.lora_name), str(adapter.lora_path), content.hex()])
    return sorted(found)


def _list_modules(server_args: Any) -> list[list[str]]:
    """List the options that determine to which modules of the model an adapter applies."""
    modules = getattr(server_args, "lora_target_modules", None) or ()
    return [sorted(map(str, modules)), [str(getattr(server_args, "experts_shared_outer_loras", None))]]


def listing(
    server_args: Any,
    pools: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    weights: str | None,
    draft: str,
    loras: list[list[str]],
    sizes: Mapping[str, int],
) -> dict[str, Listed]:
    """List everything that makes the bytes of pages comparable. All ranks of an engine create the same list.

    Args:
        server_args: SGLang's resolved options.
        pools: host pools by name.
        config: the model's configuration; empty if it can't be read.
        weights: fingerprint of the weights; None if they can't be identified.
        draft: see ``draft_fingerprint``.
        loras: see ``adapters``.
        sizes: numbers of ranks by kind of parallelism, and other sizes.
    """
    import sglang

    context_length = server_args.context_length or config.get("max_position_embeddings") or 0
    return {
        "engine": "sglang",
        "version": sglang.__version__,  # the meaning of a page's bytes may change with any release
        "weights": weights,
        "adapters": [*loras, *_list_modules(server_args)] if loras else [],
        "config": files.effective_config(config, int(context_length)),
        "dtype": str(server_args.dtype),
        "quantization": str(server_args.quantization),
        "kv_dtype": [str(server_args.kv_cache_dtype), _file_hash(server_args.quantization_param_path)],
        "pools": [
            _list_pool(name, pool, with_layers=sizes["pipeline_parallel"] == 1)
            for name, pool in sorted(pools.items())
        ],
        "draft": [draft, *(str(getattr(server_args, name, None)) for name in _DRAFT_OPTIONS)],
        "device": [str(getattr(server_args, name, None)) for name in _DEVICE_OPTIONS]
        + [os.environ.get(name, "") for name in _DEVICE_VARIABLES],
        "stages": os.environ.get("SGLANG_PP_LAYER_PARTITION", ""),
        "page_hash": page_hash(),
        **sizes,
    }


_DRAFT_OPTIONS = (
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
)

_DEVICE_OPTIONS = (
    "device",
    "model_impl",
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "enable_page_major_kv_layout",
    "enable_unified_memory",
)
_DEVICE_VARIABLES = "SGLANG_USE_HND_KVCACHE", "SGLANG_AITER_KV_CACHE_LAYOUT"
"""Variables that, like the options, determine the order of bytes on the device and hence on the host."""


def page_hash() -> str:
    """Return SGLang's hash of a fixed page, which changes if SGLang changes its algorithm."""
    from sglang.srt.mem_cache.utils import get_hash_str

    return str(get_hash_str([1, 2, 3, 4], None))


def _list_pool(name: str, pool: Any, *, with_layers: bool) -> list[Listed]:
    """List the format of a pool's pages. Stages of a pipeline differ in their number of layers."""
    fields = [*_SHAPES, *(["layer_num"] if with_layers else [])]
    shape = [str(getattr(pool, field, None)) for field in fields]
    dtypes = sorted(
        f"{field} {dtype}" for field, dtype in vars(pool).items() if isinstance(dtype, torch.dtype)
    )
    kind = [type(pool).__name__, pool.layout, str(pool.storage_format_tag)]
    return [name, pool.page_size, kind, dtypes, shape]


_SHAPES = (
    "head_num", "head_dim", "v_head_dim", "kv_cache_dim", "index_head_dim", "quant_block_size",
    "temporal_state_shape", "conv_state_shapes",
)  # fmt: skip


def _file_hash(path: str | None) -> str:
    """Return the content of a small file by its hash; empty without a file. Raises UnnamedError."""
    if not path:
        return ""
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except OSError as error:
        raise UnnamedError(f"the scales of the KV in {path} can't be read: {error}") from error
