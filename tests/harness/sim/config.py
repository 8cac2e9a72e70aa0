"""Configurations for vLLM's scheduler and the connector without an engine, a model and a device."""

import copy
import functools
import itertools
import math
import os
import tempfile
import uuid
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from vllm.config import set_current_vllm_config
from vllm.config.kv_events import KVEventsConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from testing.engine.process import connector_config
from testing.engine.tiny_model import tiny_model
from tests.harness import leaks

BLOCK, CHUNK, NUM_LAYERS = 16, 64, 2

CONNECTOR = {"chunk_tokens": CHUNK, "answer_seconds": 1.0}  # a busy machine must not turn hits into misses


@dataclass(frozen=True)
class SimGroup:
    """Layers of one kind, which share a block table."""

    kind: str = "full"
    """Kind of attention: full, mla, window, chunked. Or state: a snapshot of everything so far per block."""
    span: int = 0
    """Tokens of a sliding window, including the current token, or of an attention chunk."""
    block_tokens: int = BLOCK
    num_layers: int = NUM_LAYERS

    def read_from(self, num_computed: int) -> int:
        """The first token whose KV is read when the next token is computed."""
        starts = {
            "window": max(0, num_computed - self.span + 1),
            "chunked": num_computed // max(1, self.span) * self.span,
            "state": max(0, num_computed - 1),
        }
        return starts.get(self.kind, 0)


@dataclass(frozen=True)
class SimSettings:
    """The shape of one simulated engine."""

    runner: int = 1  # which of vLLM's two model runners
    num_drafts: int = 0  # speculative tokens of each step
    num_blocks: int = 64
    has_prefix_caching: bool = False
    is_async: bool = False  # the next step is scheduled before the tokens of the last step are known
    policy: str = "fcfs"  # order of the queue; or "priority", by the requests' field
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 128
    max_model_len: int = 2048
    head_size: int = (
        1  # a token has head_size * CELL bytes in each layer; the model fills the first CELL bytes
    )
    groups: tuple[SimGroup, ...] = (SimGroup(),)
    retention: int | None = 0  # distance in tokens of the windows and states in vLLM's own cache; None: all
    has_events: bool = False  # KV events, collected in ``SimEngine.published``
    layout: str = "LBNHC"  # vLLM's name of the physical order
    tensor_parallel: int = 1
    num_kv_heads: int = 8  # heads that tensor parallelism can split; 1 for latents
    pipeline_parallel: int = 1
    num_parts: int = 1  # nodes that share the ranks equally, each with a sidecar of its own
    max_late_outputs: int = 0  # steps that are scheduled before the output of a step is processed
    steps_together: bool = False  # one of two data-parallel ranks of a mixture-of-experts model

    @property
    def has_one_full_group(self) -> bool:
        return len(self.groups) == 1 and self.groups[0].kind in ("full", "mla")

    @property
    def has_states(self) -> bool:
        return any(group.kind == "state" for group in self.groups)

    @property
    def replicas(self) -> int:
        """Number of consecutive tensor-parallel ranks that hold the same KV."""
        return self.tensor_parallel // min(self.tensor_parallel, self.num_kv_heads)

    def layers(self, stage: int = 0) -> list[list[str]]:
        """Layer names of a pipeline stage, by group."""
        return [
            [f"group{number}.layer{stage * group.num_layers + layer}" for layer in range(group.num_layers)]
            for number, group in enumerate(self.groups)
        ]


@contextmanager
def model_runner(number: int):
    """Select a runner. vLLM reads the choice from the environment in several places."""
    value_before = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(number - 1)
    try:
        yield
    finally:
        os.environ.pop("VLLM_USE_V2_MODEL_RUNNER")
        if value_before is not None:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = value_before


def make_configs(settings: SimSettings, socket: str):
    """Configurations of the engine: VllmConfig, KVCacheConfig, block size, hash block size."""
    config = copy.deepcopy(_vllm_config(settings))
    connector = CONNECTOR if settings.num_parts == 1 else {"chunk_tokens": CHUNK}  # in time of steps
    config.kv_transfer_config = KVTransferConfig(**connector_config(socket, **connector))
    config.kv_transfer_config.engine_id = config.instance_id = uuid.uuid4().hex
    config.cache_config.num_gpu_blocks = settings.num_blocks
    config.kv_events_config = KVEventsConfig(enable_kv_cache_events=settings.has_events, publisher="null")
    cache = make_cache_config(config, settings)
    block, hash_block = resolve_kv_cache_block_sizes(cache, config)
    _join_world(config)
    if settings.steps_together:  # only now: vLLM would wait for the other rank
        config.parallel_config.data_parallel_size = 2
        config.model_config.model_arch_config.num_experts = 8
    return config, cache, block, hash_block


def part_config(config, sockets: Sequence[str], part: int):
    """The configuration of the processes on one node, of which each node has another instance id."""
    config = copy.deepcopy(config)
    config.kv_transfer_config.kv_connector_extra_config["lmcache.socket"] = sockets[part]
    config.parallel_config.nnodes, config.parallel_config.node_rank = len(sockets), part
    config.parallel_config.distributed_executor_backend = "mp"
    if part:
        config.instance_id = uuid.uuid4().hex
    return config


def make_cache_config(config, settings: SimSettings, stage: int = 0) -> KVCacheConfig:
    """The cache configuration of the ranks of a pipeline stage."""
    specs = [_spec(group, settings) for group in settings.groups]
    (page_bytes,) = {spec.page_size_bytes for spec in specs}
    outer = max(group.num_layers for group in settings.groups)
    by_layer = settings.layout.startswith("L")
    layers = settings.layers(stage)
    cache = KVCacheConfig(
        num_blocks=settings.num_blocks,
        kv_cache_tensors=[
            KVCacheTensor(
                size=outer * settings.num_blocks * page_bytes,
                layers=names,
                layer_stride=settings.num_blocks * page_bytes if by_layer else page_bytes,
                block_stride=page_bytes if by_layer else outer * page_bytes,
            )
            for names in layers  # groups share the same memory
        ],
        kv_cache_groups=list(map(KVCacheGroupSpec, layers, specs)),
        prefix_cache_retention_interval=settings.retention,
    )
    block, hash_block = resolve_kv_cache_block_sizes(cache, config)
    _set_if_known(cache, kv_tp_replicas=settings.replicas, hash_block_size=hash_block)
    if hasattr(cache, "cache_hit_alignment_tokens"):
        align = kv_cache_utils.resolve_cache_hit_alignment_tokens
        cache.cache_hit_alignment_tokens = align(cache, config, block, hash_block)
    return cache


def _set_if_known(cache: KVCacheConfig, **values: int) -> None:
    """Set fields that older versions of vLLM lack."""
    for name, value in values.items():
        if hasattr(cache, name):
            setattr(cache, name, value)


def _spec(group: SimGroup, settings: SimSettings) -> KVCacheSpec:
    """The spec of a group. All groups have pages of one size, as vLLM unifies them."""
    size = settings.head_size * BLOCK // group.block_tokens
    assert size, "blocks of more tokens need a larger head_size"
    if group.kind == "state":
        return MambaSpec(
            block_size=group.block_tokens,
            shapes=((2 * size * group.block_tokens,),),
            dtypes=(torch.float32,),
            mamba_cache_mode="align" if settings.has_prefix_caching else "none",
        )
    common = {"block_size": group.block_tokens, "num_kv_heads": 1, "dtype": torch.float32}
    if group.kind == "mla":
        return MLAAttentionSpec(head_size=2 * size, **common)
    common["head_size"] = size
    if group.kind == "window":
        return SlidingWindowSpec(sliding_window=group.span, **common)
    if group.kind == "chunked":
        return ChunkedLocalAttentionSpec(attention_chunk_size=group.span, **common)
    return FullAttentionSpec(**common)


@functools.cache
def _vllm_config(settings: SimSettings):
    drafts = {"method": "ngram", "num_speculative_tokens": settings.num_drafts, "prompt_lookup_max": 4}
    with model_runner(1):  # vLLM refuses the second runner without Triton, which no CPU has
        config = EngineArgs(
            model=str(tiny_model()),
            dtype="float32",
            enforce_eager=True,
            max_model_len=settings.max_model_len,
            block_size=32,  # for the CPU's attention, which does not run
            scheduling_policy=settings.policy,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            enable_prefix_caching=settings.has_prefix_caching,
            prefix_caching_hash_algo="sha256_cbor",
            prefix_cache_retention_interval=settings.retention,
            kv_cache_memory_bytes=1 << 20,
            kv_transfer_config=KVTransferConfig(**connector_config("unused")),
            speculative_config=drafts if settings.num_drafts else None,
        ).create_engine_config()
    config.cache_config.block_size = math.lcm(*(group.block_tokens for group in settings.groups))
    if settings.has_states:
        config.cache_config.mamba_cache_mode = "align" if settings.has_prefix_caching else "none"
        config.cache_config.mamba_block_size = config.cache_config.block_size
    config.scheduler_config.async_scheduling = settings.is_async  # forbidden by the CPU platform
    parallel = config.parallel_config
    parallel.tensor_parallel_size = settings.tensor_parallel
    parallel.pipeline_parallel_size = settings.pipeline_parallel
    parallel.world_size = settings.tensor_parallel * settings.pipeline_parallel
    names = (settings.layers(stage) for stage in range(settings.pipeline_parallel))
    config.compilation_config.static_forward_context = dict.fromkeys(
        itertools.chain(*itertools.chain(*names)), _Attention()
    )
    return config


class _Attention:
    """An attention layer: vLLM asks it for its KV layout."""

    isa = ""

    def get_attn_backend(self):
        return SimpleNamespace(get_name=lambda: "SIMULATED")


@functools.cache
def _init_world() -> str:
    init_none_hash(sha256_cbor)
    folder = tempfile.mkdtemp(prefix="lmc-sim-")
    with leaks.lasting():  # vLLM's process groups
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    return folder


def _join_world(config) -> None:
    with set_current_vllm_config(config):
        _init_world()
