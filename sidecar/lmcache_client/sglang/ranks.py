"""Places of SGLang's ranks in the columns of a row. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from lmcache_client.errors import UnsupportedError

_SHARDED = {"mamba", "draft"}
"""Pools that tensor parallelism splits, even if the model's KV is the same on all ranks."""


@dataclass(frozen=True)
class Ranks:
    """This rank among the ranks whose KV makes up one row.

    Tensor parallelism splits the heads of a page, pipeline parallelism its layers, and context parallelism
    its tokens. With MLA, all tensor-parallel ranks hold the same KV: they are **replicas**, and one of them
    stores. Data-parallel ranks are engines of their own.
    """

    shards: int
    """Parts into which tensor parallelism splits KV; 1 if the ranks are replicas."""
    shard: int
    stages: int
    stage: int
    contexts: int
    context: int
    num_replicas: int
    is_replica: bool
    """True if another rank stores the same KV."""

    @classmethod
    def of(cls, config: Any, pools: Set[str]) -> Ranks:
        """Read SGLang's HiCacheStorageConfig. Raises UnsupportedError for ranks that can't be cached."""
        if config.dcp_size > 1:
            raise UnsupportedError("decode context parallelism (--dcp-size) is not supported")
        if config.should_split_heads:
            raise UnsupportedError("tp_lcm_size is not supported: remove it from the backend's configuration")
        is_replicated = config.is_mla_model
        if is_replicated and config.tp_size > 1 and (sharded := sorted(pools & _SHARDED)):
            raise UnsupportedError(
                f"this model's KV is the same on all ranks, but not its pool {sharded[0]}: use --tp-size 1"
            )
        return cls(
            shards=1 if is_replicated else config.tp_size,
            shard=0 if is_replicated else config.tp_rank,
            stages=config.pp_size,
            stage=config.pp_rank,
            contexts=config.attn_cp_size,
            context=config.attn_cp_rank,
            num_replicas=config.tp_size if is_replicated else 1,
            is_replica=is_replicated and not config.is_storage_writer,
        )

    @property
    def num_columns(self) -> int:
        """Number of columns of a row: ranks with different KV."""
        return self.stages * self.contexts * self.shards

    @property
    def column(self) -> int:
        """This rank's column."""
        return (self.stage * self.contexts + self.context) * self.shards + self.shard

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the engine."""
        return self.num_columns * self.num_replicas

    @property
    def is_first(self) -> bool:
        """True for the rank that reports lookups."""
        return not self.column and not self.is_replica

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that determine a column's bytes."""
        return {
            "tensor_parallel": self.shards,
            "pipeline_parallel": self.stages,
            "context_parallel": self.contexts,
        }
