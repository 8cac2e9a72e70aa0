"""Places of an engine's ranks: their nodes, their columns, and the ranks that hold the same KV. Pure."""

from __future__ import annotations

from bisect import bisect
from typing import Any, NamedTuple


class RankPlace(NamedTuple):
    """Place of one rank in its engine. The ranks on one node are a part, see ``core.parts``."""

    part: int
    num_parts: int
    rank: int
    """Number of the rank among those of its part."""
    num_ranks: int
    """Number of ranks of a part."""
    owners: tuple[int, ...]
    """Ranks of the part that store KV, one per column. The ranks up to the next owner hold the same KV."""

    @classmethod
    def of(cls, parallel_config: Any, rank: int, replicas: int) -> RankPlace:
        """Return the place of a rank. Each ``replicas`` consecutive ranks of the engine hold the same KV.

        vLLM numbers ranks by pipeline stage, then by tensor-parallel rank, and gives each node a contiguous
        range. The KV of a column may be on two nodes, and each of them then stores it.
        """
        num_parts = max_parts(parallel_config)
        size = parallel_config.tensor_parallel_size * parallel_config.pipeline_parallel_size
        part, num_ranks = parallel_config.node_rank % num_parts, size // num_parts
        first = part * num_ranks
        owners = (number for number in range(num_ranks) if not number or not (first + number) % replicas)
        return cls(part, num_parts, rank - first, num_ranks, tuple(owners))

    @property
    def column(self) -> int:
        """Column of the rank, among those of its part."""
        return bisect(self.owners, self.rank) - 1

    @property
    def is_replica(self) -> bool:
        """True if another rank of the part stores the same KV."""
        return self.rank not in self.owners


def max_parts(parallel_config: Any) -> int:
    """Return the number of nodes that a data-parallel rank spans, by vLLM's configuration.

    With Ray and torchrun, the configuration does not contain these nodes. The result is then 1.
    """
    is_known = parallel_config.distributed_executor_backend == "mp"
    return max(1, parallel_config.nnodes_within_dp) if is_known else 1
