"""Agreement of the tensor parallel ranks: all of them must select the same tokens, and blend or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed import get_tp_group

from lmcache_client.errors import UnsupportedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_DIVERGED = (
    "LMCache Cluster ends this engine, because computing a blended prompt failed on %d of %d tensor parallel"
    " ranks. Later answers could be wrong. Read the errors of all ranks. If they return, set lmcache.blend to"
    " off."
)


def of_all_ranks(values: torch.Tensor, operation: ReduceOp.RedOpType) -> torch.Tensor:
    """Reduce a tensor on the CPU over all ranks."""
    group = get_tp_group()
    if group.world_size > 1:
        all_reduce(values, operation, group=group.cpu_group)
    return values


def on_all_ranks(work: Callable[[], T]) -> T:
    """Do local work. Raises UnsupportedError on all ranks if it raises on one of them."""
    result: list[T] = []
    reason = "another tensor parallel rank says in its log why"
    try:
        result.append(work())
    except UnsupportedError as error:
        reason = str(error)
    except Exception as error:
        logger.exception("Blending can't be prepared")
        reason = f"{type(error).__name__}: {error}"
    num_done = int(of_all_ranks(torch.tensor([len(result)]), ReduceOp.SUM))
    if num_done and not result:  # otherwise the caller logs the reason of the first rank, once
        logger.warning("This tensor parallel rank can't blend prompts: %s", reason)
    if num_done < get_tp_group().world_size:
        raise UnsupportedError(reason)
    return result[0]


def run_together(work: Callable[[], None]) -> None:
    """Run work with collective operations of the model. Raises its exception if it fails on all ranks.

    If it fails on some ranks only, the collectives of the others would pair with those of later work, whose
    results would be wrong. So the process ends, as if a forward pass of the engine itself had failed.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    num_failed = int(of_all_ranks(torch.tensor([int(error is not None)]), ReduceOp.SUM))
    if 0 < num_failed < get_tp_group().world_size:
        logger.critical(_DIVERGED, num_failed, get_tp_group().world_size, exc_info=error)
        raise SystemExit(1)
    if error is not None:
        raise error
