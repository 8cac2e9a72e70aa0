"""Blending in the spec of an LMCacheCluster: reuse of the KV of documents at any position of a prompt."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from lmcache_operator.api.fields import Part, Rule, field

_OFF = "Off"


class Blend(Part):
    """Reuse of the KV of documents at any position of a prompt. Answers to such prompts are approximate."""

    mode: str = field(
        'Off: all answers are exact. Write "Off" in quotes, because YAML reads it as a boolean otherwise. '
        "Request: vLLM blends the prompts of requests that ask for it in kv_transfer_params. Auto: vLLM "
        "blends each prompt that contains enough text with stored KV, so any answer can be approximate, "
        'except to requests with "blend": false. Needs a sidecar image of the operator\'s version or later: '
        "with an older one, engines run without their cache.",
        default=_OFF,
        enum=[_OFF, "Request", "Auto"],
    )
    selection: str = field(
        "Choice of the reused tokens that vLLM computes again, if a request names no other. Attended: those "
        "with most attention of the question. Deviation: those whose V differs most, as in CacheBlend. "
        "First: the first ones of each document.",
        default="Attended",
        enum=["Attended", "Deviation", "First"],
    )
    ratio_percent: int = field(
        "Per cent of the reused tokens that vLLM computes again, if a request names no other ratio. More "
        "tokens make answers closer to exact ones, and take longer.",
        default=15,
        minimum=0,
        maximum=100,
    )
    min_tokens: int = field(
        "Least number of tokens with KV of another position for which vLLM blends a prompt. It computes "
        "other prompts exactly.",
        default=256,
        minimum=1,
        maximum=2**31 - 1,
    )
    separator: str | None = field(
        'Text between the documents of prompts, for requests with "separator": true. Tokenizers must not '
        "merge it with other text. Use a special token of the model, or text that begins with a blank and "
        "ends with a line break.",
        maxLength=256,
    )


def is_off(blend: Blend | None) -> bool:
    """Return whether no request can have its prompt blended."""
    return blend is None or blend.mode == _OFF


def is_off_in_cel(engine: str) -> str:
    """Return the CEL expression of ``is_off`` for the engine at a path."""
    return f"!has({engine}.blend) || {engine}.blend.mode == '{_OFF}'"


def connector_settings(blend: Blend | None) -> dict[str, Any]:
    """Return the settings of the connector in vLLM; none if blending is off."""
    if blend is None or is_off(blend):
        return {}
    separator = {"lmcache.blend_separator": blend.separator} if blend.separator else {}
    return {
        "lmcache.blend": blend.mode.lower(),
        "lmcache.blend_min_tokens": blend.min_tokens,
        "lmcache.blend_ratio": blend.ratio_percent / 100,
        "lmcache.blend_selection": blend.selection.lower(),
        **separator,
    }


def _needs(cel: str, message: str, holds: Callable[[Any], bool]) -> Rule:
    """Return a rule of engines that blend, whatever the mode."""
    cel = f"{is_off_in_cel('self')} || {cel}"
    return Rule(cel, message, lambda engine: is_off(engine.blend) or holds(engine))


_LORA = "^--enable[-_]lora?$"  # vLLM also accepts an option without its last letters
ENGINE_RULES = (
    _needs(
        "self.nodes == 1",
        "engine.blend needs engines of one pod for now: leave out blend or nodes",
        lambda engine: engine.nodes == 1,
    ),
    _needs(
        "self.parallelism.pipeline == 1",
        "engine.blend needs parallelism.pipeline 1 for now: leave out blend, or set parallelism.tensor",
        lambda engine: engine.parallelism.pipeline == 1,
    ),
    _needs(
        "!self.parallelism.expert || self.parallelism.data == 1",
        "engine.blend does not support parallelism.expert with data > 1 for now, because these ranks step "
        "together: set parallelism.tensor instead of data, or leave out blend",
        lambda engine: not engine.parallelism.expert or engine.parallelism.data == 1,
    ),
    _needs(
        "!has(self.prefill)",
        "engine.blend does not work with engine.prefill, because the router sends prefill pods no "
        "kv_transfer_params of clients: leave out blend or prefill",
        lambda engine: engine.prefill is None,
    ),
    _needs(
        f"!self.args.exists(a, a.matches('{_LORA}'))",
        "engine.blend does not support LoRA adapters for now: leave out blend, or --enable-lora in args",
        lambda engine: not any(re.match(_LORA, argument) for argument in engine.args),
    ),
)
"""Rules of the engine's spec."""
