"""Attaches the two sides of the connector to the sidecar, from the engine's configuration."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lmcache_client.blend import selection
from lmcache_client.core import files
from lmcache_client.core.copier import STAGING_GROUP, EngineCopier
from lmcache_client.core.cuda_copier import make_copier
from lmcache_client.core.jobs import EngineIdentity
from lmcache_client.core.layout import KVCaches, Layout, num_bytes, page_views, tensors_of
from lmcache_client.core.parts import PartedIdentity, part_namespace
from lmcache_client.core.settings import TOKENS_PER_SECOND, read_settings
from lmcache_client.cuda.driver import Device
from lmcache_client.errors import UnnamedError, UnsupportedError
from lmcache_client.off_notice import OffNotice
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.hello import ClientHello, PartedHello, Role, TransferOffer
from lmcache_client.rpc.service import DEFAULT_SOCKET
from lmcache_client.vllm import fingerprint
from lmcache_client.vllm.groups import GroupSpec, num_replicas, read_groups
from lmcache_client.vllm.layouts import check_stages, check_supported, content_id
from lmcache_client.vllm.places import RankPlace
from lmcache_store import keys
from lmcache_store.common import options
from lmcache_store.common.units import round_up
from lmcache_store.kv_groups import KVGroup, stored_blocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class VLLMSettings:
    """Settings in ``kv_connector_extra_config``, where their names start with ``lmcache.``."""

    socket: str = options.setting(DEFAULT_SOCKET, str)
    chunk_tokens: int = options.setting(256, options.number(int, 1, math.inf, "a positive number"))
    answer_seconds: float = options.setting(0.0, options.number(float, 0, math.inf, "a number of seconds"))
    """Longest silence of the sidecar before an answer, and between two promoted rows; 0: as measured."""
    prefill_tokens_per_second: float = options.setting(0.0, TOKENS_PER_SECOND)
    """Speed of the engine, with which loads are compared; 0: as measured."""
    copy_threads: int | None = options.setting(None, options.number(int, 1, 64, "a number from 1 to 64"))
    """Threads of a load in host memory; None: 2 if there is more than one core."""
    kv_cache_layout: str | None = options.setting(None, options.one_of("LBHNC", "LBNHC", "BLHNC", "BLNHC"))
    """Order of layers, blocks, heads, tokens and content in device memory to require from the engine. If
    blocks come first, a block is one piece. None: the engine's default."""
    blend: str = options.setting("off", options.one_of("off", "request", "auto"))
    """Prompts that are blended: none, those of requests that ask for it, or all with known documents."""
    blend_selection: str = options.setting("attended", options.one_of(*selection.NAMES))
    """How the tokens to recompute are selected, unless the request says it."""
    blend_ratio: float = options.setting(0.15, options.number(float, 0, 1, "a number from 0 to 1"))
    """Share of the reused tokens that is recomputed, unless the request says it."""
    blend_min_tokens: int = options.setting(256, options.number(int, 1, math.inf, "a positive number"))
    """Least number of reused tokens for which a prompt is blended."""
    blend_separator: str = options.setting("", str)
    """Text between the documents of a prompt; empty: requests must name the places of their documents."""

    @classmethod
    def read(cls, extra_config: Mapping[str, Any]) -> VLLMSettings:
        """Read and check the settings, see ``read_settings``. Raises UnsupportedError."""
        return read_settings(cls, extra_config)


def attach_worker(
    vllm_config: Any, kv_cache_config: Any, kv_caches: KVCaches, staging: Layout | None = None
) -> tuple[SidecarClient, EngineCopier, EngineIdentity]:
    """Identify this rank and its KV, and start its client. May read all weights to hash them.

    ``staging``: blocks to which rows of documents are loaded; None: the engine can't blend prompts.

    Raises UnsupportedError or ValueError if the engine can't be cached.
    """
    from vllm.distributed.kv_transfer.kv_connector.v1 import base
    from vllm.distributed.parallel_state import get_node_count

    settings = VLLMSettings.read(vllm_config.kv_transfer_config.kv_connector_extra_config)
    check_supported(vllm_config, kv_cache_config, get_node_count())
    specs = read_groups(kv_cache_config, can_fail_requests=hasattr(base, "KVConnectorTransferResults"))
    step_tokens, hash_tokens = grid_tokens(kv_cache_config)
    chunk_tokens = whole_chunk_tokens(settings.chunk_tokens, step_tokens)
    groups, layouts = _lay_out(specs, chunk_tokens, kv_caches, kv_cache_config.num_blocks)
    check_stages(vllm_config, layouts.values())
    contents = [_list_group(vllm_config, spec, kv_caches, kv_cache_config.num_blocks) for spec in specs]
    staged = {} if staging is None else {STAGING_GROUP: staging}
    copier = make_copier(layouts | staged, settings.copy_threads)
    parallel = vllm_config.parallel_config
    replicas = num_replicas(parallel.tensor_parallel_size, kv_cache_config)
    shards = parallel.tensor_parallel_size // replicas
    place = RankPlace.of(parallel, _rank(parallel), replicas)
    namespace, reason = _namespace(vllm_config, contents, shards, (chunk_tokens, hash_tokens), place)
    hello = ClientHello(
        role=Role.WORKER,
        engine_uuid=_engine_uuid(vllm_config),
        namespace=part_namespace(namespace, place.part),
        chunk_tokens=chunk_tokens,
        groups=_of_largest_stage(vllm_config, groups, layouts),
        num_columns=len(place.owners),
        column=place.column,
        private_reason=reason,
        model=vllm_config.model_config.model,
        transfer=_transfer(copier, is_replica=place.is_replica),
        kv_bytes=0 if place.is_replica else num_bytes(kv_caches),  # replicas count as one cache
    )
    nodes = _numa_nodes(hello.transfer.gpu_uuid, place)
    hello = replace(hello, numa_nodes=nodes, computes_on_cpu=not hello.transfer.gpu_uuid)
    identity = EngineIdentity(hello, hash_tokens, replicas, place.is_replica, staging is not None)
    if place.num_parts > 1:
        hello = PartedHello(**vars(hello), num_parts=place.num_parts)
        parts = place.part, place.num_parts, place.num_parts * place.num_ranks
        is_speaker, num_batches = place.part > 0 and not place.rank, vllm_config.max_concurrent_batches
        identity = PartedIdentity(
            hello, hash_tokens, replicas, place.is_replica, False, *parts, is_speaker, num_batches
        )
    return start_client(settings.socket, hello, copier), copier, identity


def grid_tokens(kv_cache_config: Any) -> tuple[int, int]:
    """Return (tokens of which each chunk is a multiple, tokens of one of the engine's block hashes)."""
    step_tokens = math.lcm(*(group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups))
    hash_tokens: int = getattr(kv_cache_config, "hash_block_size", None) or step_tokens
    return math.lcm(step_tokens, hash_tokens), hash_tokens


_ENLARGED = (
    "LMCache Cluster uses chunks of %d tokens, not %d (lmcache.chunk_tokens):"
    " this engine's blocks have %d tokens. Prompts shorter than %d tokens are not cached."
)


def whole_chunk_tokens(wanted_tokens: int, block_tokens: int) -> int:
    """Round the size of a chunk up to a multiple of the engine's blocks, and log a warning if it changes.

    Models with state layers have blocks of hundreds of tokens. vLLM derives their size from the size of a
    state, which depends on the processor. Without the warning, shorter prompts would be skipped silently.
    """
    chunk_tokens = round_up(wanted_tokens, block_tokens)
    if chunk_tokens != wanted_tokens:
        logger.warning(_ENLARGED, chunk_tokens, wanted_tokens, block_tokens, chunk_tokens)
    return chunk_tokens


def _lay_out(
    specs: Sequence[GroupSpec], chunk_tokens: int, kv_caches: KVCaches, num_blocks: int
) -> tuple[list[KVGroup], dict[int, Layout]]:
    """Return the KV groups, those with full attention first, and the layouts of groups that store rows.

    Raises UnsupportedError if no group stores rows.
    """
    groups, layouts = [], {}
    for number, spec in enumerate(specs):
        group = KVGroup(number, spec.block_tokens, 0, spec.window_tokens, spec.kind)
        if blocks_per_row := stored_blocks(group, chunk_tokens):
            layout = Layout(tuple(page_views(spec.layers, kv_caches, num_blocks)), blocks_per_row)
            layouts[number], group = layout, replace(group, chunk_bytes=layout.row_bytes)
        groups.append(group)
    if not layouts:
        raise UnsupportedError("nothing can be cached: no KV group has blocks that a hit could use")
    return sorted(groups, key=lambda group: not group.is_full), layouts


def start_scheduler_client(socket: str, identity: EngineIdentity) -> SidecarClient:
    """Start the client of the scheduler side, from the identity that a worker has reported."""
    hello = replace(identity.hello, role=Role.SCHEDULER, column=0, transfer=TransferOffer(), kv_bytes=0)
    return start_client(socket, hello)


def start_client(socket: str, hello: ClientHello, copier: EngineCopier | None = None) -> SidecarClient:
    """Start a client that attaches in the background. A worker's copier prepares the arena for copies."""
    notice = OffNotice("lmcache.socket in --kv-transfer-config, or LMCACHE_SOCKET")
    client = SidecarClient(socket, hello, on_rows=copier.prepare if copier else None, notice=notice)
    if copier is not None:
        copier.watch_pins(client.report_pins)
    client.start()
    return client


def _namespace(
    vllm_config: Any,
    contents: list[fingerprint.GroupContents],
    shards: int,
    grid_tokens: tuple[int, int],
    place: RankPlace,
) -> tuple[bytes, str]:
    """Return the engine's namespace, and why no other engine shares it; empty if others can."""
    from vllm.v1.core import kv_cache_utils

    reason = fingerprint.private_reason(vllm_config, hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED"))
    weights = None
    if not reason:
        try:
            began = files.process_start_time()
            weights = files.in_background(fingerprint.weights_fingerprint, vllm_config, began).result()
        except UnnamedError as error:
            reason = f"the weights can't be identified: {error}"
    listing = fingerprint.listing(vllm_config, weights, contents, shards, grid_tokens)
    if place.num_parts > 1:  # rows have the columns of one part
        listing["parts"] = place.num_parts
    if reason:
        listing["private_to"] = _engine_uuid(vllm_config)
        logger.warning("Cached KV stays private to this engine: %s", reason)
    return keys.namespace(listing), reason


def _list_group(
    vllm_config: Any, spec: GroupSpec, kv_caches: KVCaches, num_blocks: int
) -> fingerprint.GroupContents:
    """Return the group's kind and sizes, and the content ids of its layers."""
    contents = [
        (layer, _content_id(vllm_config, layer, tensor, num_blocks))
        for layer in spec.layers
        for tensor in tensors_of(kv_caches[layer])
    ]
    fields: list[str | int] = [spec.kind.name, spec.window_tokens, spec.block_tokens, int(spec.is_drafter)]
    return fields, contents


def _content_id(vllm_config: Any, layer: str, kv: torch.Tensor, num_blocks: int) -> str:
    import vllm

    attention = vllm_config.compilation_config.static_forward_context[layer]
    backend = attention.get_attn_backend().get_name()
    return content_id(kv, num_blocks, backend, getattr(attention, "isa", ""), vllm.__version__)


def _rank(parallel: Any) -> int:
    """Return the number of this rank in its engine."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    stage, rank = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
    return int(stage * parallel.tensor_parallel_size + rank)


def _transfer(copier: EngineCopier, *, is_replica: bool) -> TransferOffer:
    offer = copier.offer()
    if is_replica and offer.gpu_uuid:
        return TransferOffer(offer.gpu_uuid, refusal="another rank stores the same KV")
    return offer


def _numa_nodes(gpu_uuid: str, place: RankPlace) -> tuple[int, ...]:
    """Return the NUMA node of the GPU of each column of this node; empty if one is unknown.

    vLLM gives each data-parallel rank the next visible GPUs, in the order of its ranks, unless each rank sees
    only its own GPU.
    """
    devices = Device.visible() if gpu_uuid else []
    first = next((n for n, device in enumerate(devices) if device.uuid == gpu_uuid), -1) - place.rank
    if first < 0 or first % place.num_ranks or len(devices) < first + place.num_ranks:
        return ()
    nodes = [devices[first + owner].numa_node for owner in place.owners]
    return tuple(node for node in nodes if node is not None) if None not in nodes else ()


def can_wait(vllm_config: Any) -> bool:
    """Return False if a wait would stop other ranks: those of a mixture-of-experts model step together.

    The data-parallel ranks of other models are independent: in their processes, vLLM sets the size to 1.
    """
    return vllm_config.parallel_config.data_parallel_size == 1 or not vllm_config.model_config.is_moe


def _of_largest_stage(
    vllm_config: Any, groups: Sequence[KVGroup], layouts: Mapping[int, Layout]
) -> tuple[KVGroup, ...]:
    """Return the groups with the row size of the largest pipeline stage, which is that of all columns."""
    stages = fingerprint.stages(vllm_config)
    if not stages:
        return tuple(groups)
    max_layers = max(end - start for start, end in stages)
    ((number, layout),) = layouts.items()
    row_bytes = layout.blocks_per_row * layout.pages[0].shape[1] * max_layers
    return tuple(
        replace(group, chunk_bytes=row_bytes) if group.group == number else group for group in groups
    )


def _engine_uuid(vllm_config: Any) -> bytes:
    """Return the id of this engine instance: the same in all its processes, and new after a restart."""
    instance = f"{vllm_config.kv_transfer_config.engine_id}/{vllm_config.instance_id}"
    return hashlib.sha256(instance.encode()).digest()[:16]
