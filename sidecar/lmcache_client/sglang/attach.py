"""Attaches one rank of SGLang to the sidecar, from its host pools and options."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lmcache_client.core import files
from lmcache_client.core.copier import allowed_cores
from lmcache_client.core.jobs import EngineIdentity
from lmcache_client.core.paged.blocking import BlockingAccess, Limits
from lmcache_client.errors import UnnamedError, UnsupportedError
from lmcache_client.off_notice import OffNotice
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import ClientHello, Role
from lmcache_client.sglang import naming, windows
from lmcache_client.sglang.options import EngineOptions, SGLangSettings
from lmcache_client.sglang.pools import PoolCopier
from lmcache_client.sglang.ranks import Ranks
from lmcache_client.sglang.weights import WATCH
from lmcache_store import keys
from lmcache_store.kv_groups import GroupKind, KVGroup

logger = logging.getLogger(__name__)

ANCHOR = "kv"
"""Name of the pool whose pages the other pools follow."""

_KINDS = {
    ANCHOR: GroupKind.FULL_ATTENTION,
    "indexer": GroupKind.FULL_ATTENTION,
    "draft": GroupKind.FULL_ATTENTION,
    "draft_indexer": GroupKind.FULL_ATTENTION,
    "swa": GroupKind.SLIDING_WINDOW,
    "mamba": GroupKind.STATE,
}
"""Kinds of SGLang's pools that can be cached."""


def attach(storage_config: Any, pools: Mapping[str, Any], settings: SGLangSettings) -> BlockingAccess:
    """Identify this rank's KV and start its client. May read all weights to hash them.

    Args:
        storage_config: SGLang's HiCacheStorageConfig.
        pools: SGLang's host pools by name.
        settings: our settings.

    Raises UnsupportedError or ValueError if the engine can't be cached.
    """
    engine, ranks = EngineOptions(), Ranks.of(storage_config, set(pools))
    page_tokens = pools[ANCHOR].page_size
    _check_options(storage_config.extra_config or {}, engine, ranks)
    if page_tokens < settings.min_page_tokens:
        raise UnsupportedError(
            f"pages of {page_tokens} tokens are too small: start SGLang with --page-size 64, or set"
            f" lmcache.min_page_tokens to {page_tokens}"
        )
    groups = groups_of(pools)
    has_windows = any(_KINDS[pool] is GroupKind.SLIDING_WINDOW for pool in groups)
    window_tokens = windows.window_pages() * page_tokens if has_windows else 0
    num_threads = settings.copy_threads or min(2, len(allowed_cores()))
    copier = PoolCopier({number: pools[name] for number, name in enumerate(groups)}, num_threads)
    uuid = engine_uuid(engine, storage_config.dp_rank, is_alone=ranks.num_ranks == 1)
    name = _namespace(engine, pools, uuid, {"page_tokens": page_tokens, **ranks.sizes})
    hello = ClientHello(
        role=Role.WORKER,
        engine_uuid=uuid,
        namespace=name.namespace,
        chunk_tokens=page_tokens,
        groups=tuple(
            KVGroup(
                number,
                page_tokens,
                _column_bytes(pools[pool], copier.row_bytes[number], ranks, name.config),
                window_tokens if _KINDS[pool] is GroupKind.SLIDING_WINDOW else 0,
                _KINDS[pool],
            )
            for number, pool in enumerate(groups)
        ),
        num_columns=ranks.num_columns,
        column=ranks.column,
        private_reason=name.private_reason,
        model=str(storage_config.model_name or ""),
        kv_bytes=0 if ranks.is_replica else _kv_bytes(engine, pools),
        computes_on_cpu=getattr(engine, "device", "") == "cpu",
    )
    notice = OffNotice("lmcache.socket in --hicache-storage-backend-extra-config, or LMCACHE_SOCKET")
    client = SidecarClient(settings.socket, hello, on_rows=copier.prepare, notice=notice)
    client.start()
    return BlockingAccess(
        client,
        EngineIdentity(hello, page_tokens, ranks.num_replicas, ranks.is_replica),
        copier,
        Limits(settings.lookup_seconds, settings.row_seconds, settings.load_seconds, settings.lease_seconds),
        prefill_tokens_per_second=settings.prefill_tokens_per_second,
    )


def _check_options(extra_config: Mapping[str, Any], engine: EngineOptions, ranks: Ranks) -> None:
    """Raise UnsupportedError for options with which nothing would be cached."""
    if not extra_config.get("interface_v1"):
        raise UnsupportedError(
            'SGLang passes no pages: add "interface_v1": 1 to --hicache-storage-backend-extra-config'
        )
    if engine.enable_lora and not WATCH.is_complete:
        raise UnsupportedError(
            "the engine serves LoRA adapters and was started without this backend, so its KV may have wrong"
            " names: start SGLang with the backend"
        )
    if ranks.num_columns > 1 and (num_nodes := getattr(engine, "nnodes", 1)) > 1:
        raise UnsupportedError(
            f"the KV of one page is on {num_nodes} machines, but a sidecar needs all of it: use --nnodes 1"
        )


def is_reporter(storage_config: Any) -> bool:
    """Return True for the rank that reports requests."""
    return Ranks.of(storage_config, set()).is_first


def groups_of(pools: Mapping[str, Any]) -> list[str]:
    """Return the names of the pools in the order of their KV groups. Raises UnsupportedError."""
    if unknown := sorted(pools.keys() - _KINDS.keys()):
        raise UnsupportedError(
            f"SGLang keeps KV of this model in a pool that can't be cached yet: {unknown[0]}"
        )
    return sorted(
        pools, key=lambda name: (_KINDS[name] is not GroupKind.FULL_ATTENTION, name != ANCHOR, name)
    )


def _column_bytes(pool: Any, row_bytes: int, ranks: Ranks, config: Mapping[str, Any]) -> int:
    """Return the bytes of a column, which is as large as in the pipeline stage with the most layers."""
    if ranks.stages == 1:
        return row_bytes
    from sglang.srt.distributed.utils import get_pp_indices

    num_layers = int(config.get("num_hidden_layers") or 0)
    if not num_layers or pool.layer_num != pool.end_layer - pool.start_layer:
        raise UnsupportedError("the layers of this model's pipeline stages are not known: use --pp-size 1")
    stages = (get_pp_indices(num_layers, stage, ranks.stages) for stage in range(ranks.stages))
    return row_bytes // int(pool.layer_num) * max(int(end - start) for start, end in stages)


class _Name(NamedTuple):
    namespace: bytes
    private_reason: str
    """Why no other engine shares the namespace; empty if others can."""
    config: dict[str, Any]
    """The model's configuration; empty if it can't be read."""


def _namespace(
    engine: EngineOptions, pools: Mapping[str, Any], uuid: bytes, sizes: Mapping[str, int]
) -> _Name:
    began = files.process_start_time()
    reason = naming.private_reason(engine, is_from_start=WATCH.is_complete)
    weights: str | None = None
    draft = ""
    config: dict[str, Any] = {}
    loras: list[list[str]] = []
    try:
        config = naming.model_config(engine, began)
        reason = reason or _media_reason(config)
        if not reason:
            loras = naming.adapters(engine, began)
            weights = files.in_background(naming.weights_fingerprint, engine, began).result()
            draft = files.in_background(naming.draft_fingerprint, engine, began).result()
    except (UnnamedError, OSError) as error:
        reason = reason or f"the model can't be identified: {error}"
    listing = naming.listing(
        engine, pools, config=config, weights=weights, draft=draft, loras=loras, sizes=sizes
    )
    if reason:
        listing["private_to"] = uuid
        logger.warning("Cached KV stays private to this engine: %s", reason)
    return _Name(keys.namespace(listing), reason, config)


def _media_reason(config: Mapping[str, Any]) -> str:
    """Return why KV of a model with images, videos or sounds can't be shared; empty for other models."""
    from sglang.srt.configs.model_config import is_multimodal_model

    if not is_multimodal_model(config.get("architectures") or []):
        return ""
    return "SGLang names images by 30 bits of a hash, so that images of two users may have one name"


def engine_uuid(engine: EngineOptions, dp_rank: int, *, is_alone: bool) -> bytes:
    """Return the id of this engine instance: the same in all its ranks, and new after a restart.

    SGLang gives its ranks no common id, so it is derived from the process that started them.
    """
    if is_alone:
        return os.urandom(16)
    parent = os.getppid()
    fields = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    replica = getattr(engine, "dp_rank", None)  # of --dp-size without data-parallel attention
    parts = boot, parent, fields[19], getattr(engine, "random_seed", None), engine.port, dp_rank, replica
    return hashlib.sha256(repr(parts).encode()).digest()[:16]


def _kv_bytes(engine: EngineOptions, pools: Mapping[str, Any]) -> int:
    """Return the bytes of KV that the engine itself retains: on its device, and in host memory."""
    total = 0
    for pool in pools.values():
        host_tokens = pool.size if engine.hicache_host_memory_mode == "cache" else 0
        device_tokens = getattr(pool, "device_capacity_tokens", 0)  # pools of states and indexes have none
        total += max(device_tokens, host_tokens) * pool.size_per_token
    return int(total)


def wait_attached(access: BlockingAccess, deadline: float) -> None:
    """Wait until the sidecar has accepted this rank, at most until ``deadline`` (monotonic seconds)."""
    while not access.is_attached and time.monotonic() < deadline:
        time.sleep(0.01)
