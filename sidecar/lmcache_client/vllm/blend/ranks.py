"""Agreement of the tensor parallel ranks: all of them must select the same tokens, and blend or not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
from torch.distributed import ReduceOp, all_reduce
from vllm.distributed import get_tp_group

from lmcache_client.errors import UnsupportedError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FOREVER, _PATIENCE = timedelta(0), timedelta(minutes=1)
_ELSEWHERE = "another tensor parallel rank says in its log why"

_DIVERGED = (
    "LMCache Cluster ends this engine, because computing a blended prompt failed on %d of %d tensor parallel"
    " ranks. Later answers could be wrong. Read the errors of all ranks. If they return, set lmcache.blend to"
    " off."
)


class _LeftError(UnsupportedError):
    """Work of ``on_all_ranks`` has failed on another rank."""


def of_all_ranks(
    values: torch.Tensor, operation: ReduceOp.RedOpType, patience: timedelta = _FOREVER
) -> torch.Tensor:
    """Reduce a tensor on the CPU over all ranks. Raises RuntimeError after ``patience``."""
    group = get_tp_group()
    if group.world_size > 1:
        all_reduce(values, operation, group=group.cpu_group, async_op=True).wait(patience)
    return values


def on_all_ranks(work: Callable[[], T]) -> T:
    """Do local work. Raises UnsupportedError on all ranks if it raises on one of them.

    If the work has collective operations of the model, each is in ``go_on_together``.
    """
    result: list[T] = []
    reason = _ELSEWHERE
    try:
        result.append(work())
    except _LeftError:
        raise  # all ranks have agreed
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


def go_on_together(work: Callable[[], None]) -> None:
    """Run work of ``on_all_ranks`` that has collective operations of the model, see ``run_together``.

    Raises UnsupportedError if another rank has failed before: it would take no part in them.
    """
    if int(of_all_ranks(torch.tensor([1]), ReduceOp.SUM)) < get_tp_group().world_size:
        raise _LeftError(_ELSEWHERE)
    run_together(work)


def run_together(work: Callable[[], None]) -> None:
    """Run work with collective operations of the model. Raises its exception if it fails on all ranks.

    If it fails on some ranks only, the collectives of the others would pair with those of later work, whose
    results would be wrong. So the process ends, as if a forward pass of the engine itself had failed. Ranks
    that wait in a collective for a failed one do not get here, so that one ends without their answer.
    """
    error: Exception | None = None
    try:
        work()
    except Exception as raised:
        error = raised
    try:
        patience = _FOREVER if error is None else _PATIENCE
        num_failed = int(of_all_ranks(torch.tensor([int(error is not None)]), ReduceOp.SUM, patience))
    except RuntimeError:
        num_failed = 1
    if 0 < num_failed < get_tp_group().world_size:
        logger.critical(_DIVERGED, num_failed, get_tp_group().world_size, exc_info=error)
        raise SystemExit(1)
    if error is not None:
        raise error
