"""Models with sliding windows or short convolutions, for engines whose KV is in host memory.

This is an SGLang plugin like ``sglang_on_cpu``. It completes the attention backend ``torch_native``, and
replaces convolutions, which are kernels for GPUs. The pools of keys, values and states, and everything above
the pools, are SGLang's own code.

``tests/integration/test_sglang_models.py`` compares the answers of these engines with those of transformers.
Runs with these stand-ins prove nothing about the kernels that SGLang uses on a GPU.
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from testing.sglang.cpu.sglang_on_cpu import copy_rows, load_layer, store_layers

_DIRECT_COPIES = "dsa", "mamba"
"""Modules of host pools that use the copies of ``sglang_on_cpu``."""
_ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "silu": functional.silu,
    "swish": functional.silu,
}


class _WindowTable:
    """A table of the tokens of requests, in the slots of the window pool."""

    def __init__(self, table: torch.Tensor, window_slots: torch.Tensor) -> None:
        self._table = table
        self._window_slots = window_slots

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._window_slots[self._table[index]]


def read_windows(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Wrap an attention method of ``torch_native``, so that it reads windows from the slots that have them.

    Layers with windows have a pool of their own. ``torch_native`` writes their keys and values to slots of
    this pool, but reads them at the slot numbers of the other pool. Backends for GPUs translate both.
    """

    def attend_translated(
        self: Any,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        table: Any = req_to_token
        pool = self.token_to_kv_pool
        if self.use_sliding_window_kv_pool:
            window_layers = {layer.data_ptr() for layer in pool.swa_kv_pool.k_buffer}
            if k_cache.data_ptr() in window_layers:
                table = _WindowTable(req_to_token, pool.full_to_swa_index_mapping)
        return attend(self, query, output, k_cache, v_cache, table, *args, **kwargs)

    return attend_translated


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    cache_indices: torch.Tensor,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = None,
    pad_slot_id: int = -1,
    **_: Any,
) -> torch.Tensor:
    """Convolve prompts, and store the states after their last tokens.

    Replaces the Triton kernel ``causal_conv1d_fn``.

    Args:
        x: ``[channels, tokens]``, all prompts one after another
        weight: ``[channels, width]``
        bias: ``[channels]``
        conv_states: ``[slots, channels, width - 1]``
        query_start_loc: the first token of each prompt, and the number of tokens
        cache_indices: the slot of each prompt
        has_initial_state: whether a prompt continues from the state in its slot
        activation: None, ``silu`` or ``swish``
        pad_slot_id: the slot of padding, which has no state
    """
    output = torch.zeros_like(x)
    starts = query_start_loc.tolist()
    for number, (start, end) in enumerate(itertools.pairwise(starts)):
        slot = int(cache_indices[number])
        if slot == pad_slot_id or start == end:
            continue
        state = conv_states[slot]
        is_continued = has_initial_state is not None and bool(has_initial_state[number])
        before = state if is_continued else torch.zeros_like(state)
        output[:, start:end] = _convolve_line(x[:, start:end], before, state, weight, bias, activation)
    return output


def convolve_token(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    conv_state_indices: torch.Tensor,
    pad_slot_id: int = -1,
    **_: Any,
) -> torch.Tensor:
    """Convolve one token of each request. Replaces the Triton kernel ``causal_conv1d_update``.

    ``x`` is ``[requests, channels]``. The other arguments are those of ``convolve``.
    """
    output = torch.zeros_like(x)
    for number, slot in enumerate(conv_state_indices.tolist()):
        if slot != pad_slot_id:
            state = conv_state[slot]
            output[number] = _convolve_line(x[number, :, None], state, state, weight, bias, activation)[:, 0]
    return output


def register() -> None:
    """Put the stand-ins in place."""
    import importlib

    from sglang.srt.layers.attention.mamba import causal_conv1d
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(TorchNativeAttnBackend, name, read_windows(getattr(TorchNativeAttnBackend, name)))
    causal_conv1d._causal_conv1d_fn_triton = convolve
    causal_conv1d._causal_conv1d_update_triton = convolve_token
    for name in _DIRECT_COPIES:
        module: Any = importlib.import_module(f"sglang.srt.mem_cache.pool_host.{name}")
        module.transfer_kv_direct = copy_rows
        module.transfer_kv_per_layer_direct_pf_lf = load_layer
        module.transfer_kv_all_layer_direct_lf_pf = store_layers


def _convolve_line(
    x: torch.Tensor,
    before: torch.Tensor,
    state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
) -> torch.Tensor:
    """Convolve the tokens ``x`` that follow the tokens ``before``, and update ``state``."""
    line = torch.cat([before.to(x.dtype), x], 1)
    result = functional.conv1d(line[None], weight[:, None], bias, groups=len(weight))[0]
    state.copy_(line[:, -state.shape[1] :])
    return _ACTIVATIONS[activation](result)
