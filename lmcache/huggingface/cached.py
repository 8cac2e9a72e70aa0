"""A transformers model whose prompts' KV is stored in, and retrieved from, an LMCacheEngine.

    config = LMCacheEngineConfig.from_defaults(local_device="cpu", remote_url=None, remote_serde=None)
    engine = LMCacheEngine(config, metadata_of(model, "my-model", config.chunk_size))
    cached = CachedModel(model, engine)
    output = cached.generate(input_ids, max_new_tokens=32)  # computes only what is not stored yet

Checked with transformers 5.19: ``generate`` computes those tokens of ``input_ids`` that the DynamicCache
given to it does not hold, and leaves the KV of all tokens but the last in it.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineMetadata
from lmcache.logging import init_logger

logger = init_logger(__name__)

_REFUSED = (
    "past_key_values",
    "assistant_model",
    "assistant_early_exit",
    "token_healing",
    "prompt_lookup_num_tokens",
    "prefill_chunk_size",
    "custom_generate",
)
"""Arguments of ``generate`` that use the cache in a way that CachedModel does not support."""


def metadata_of(model: PreTrainedModel, model_name: str, chunk_size: int) -> LMCacheEngineMetadata:
    """Return the metadata that an engine needs. ``model_name`` identifies the model's weights in all keys."""
    config = model.config.get_text_config(decoder=True)
    num_heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    shape = (config.num_hidden_layers, 2, chunk_size, num_kv_heads, head_size)
    return LMCacheEngineMetadata(model_name, 1, 0, "huggingface", model.dtype, shape)


class CachedModel:
    """Generates exactly as the model does. A cache fault costs time, never an answer."""

    def __init__(self, model: PreTrainedModel, engine: LMCacheEngine) -> None:
        """Raises ValueError if the engine's metadata does not fit the model (see ``metadata_of``)."""
        metadata = engine.metadata
        expected = metadata_of(model, metadata.model_name, engine.chunk_size)
        actual = (metadata.fmt, metadata.kv_dtype, tuple(metadata.kv_shape))
        if actual != (expected.fmt, expected.kv_dtype, expected.kv_shape):
            raise ValueError(f"the engine's metadata {metadata} does not fit the model: {expected}")
        self.model = model
        self.engine = engine

    def generate(self, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        """Return what ``model.generate(input_ids, **kwargs)`` returns, for int64 ``[1, num_tokens]``.

        Some calls can't be cached: a batch, beams, padding, images, a model with sliding windows or another
        kind of cache. They run without the cache, and a log line gives the reason. If the engine has
        ``save_decode_cache``, the KV of generated tokens is stored, too.
        """
        if obstacle := obstacle_of_model(self.model) or self.obstacle_of_call(input_ids, kwargs):
            logger.info("The prompt's KV is not cached: %s", obstacle)
            return self.model.generate(input_ids, **kwargs)
        tokens = input_ids[0].cpu()
        cache = self._retrieve(tokens)
        output = self.model.generate(input_ids, past_key_values=cache, **kwargs)
        if self.engine.save_decode_cache:
            sequences = output if isinstance(output, torch.Tensor) else output.sequences
            tokens = sequences[0, : cache.get_seq_length()].cpu()
        self._store(tokens, cache)
        return output

    def obstacle_of_call(self, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> str | None:
        """Return why ``generate`` can't cache with these arguments; None if it can."""
        config = kwargs.get("generation_config") or self.model.generation_config
        settings = config.to_dict() | kwargs
        mask, padding = kwargs.get("attention_mask"), settings.get("pad_token_id")
        if mask is None and padding is not None and padding not in _listed(settings.get("eos_token_id")):
            mask = input_ids != padding  # the mask that ``generate`` uses by default
        if input_ids.dim() != 2 or input_ids.shape[0] != 1:
            return f"input_ids have the shape {list(input_ids.shape)}, not [1, num_tokens]"
        if mask is not None and (mask.shape != input_ids.shape or not bool(mask.all())):
            return "the attention mask hides tokens, or is of another shape"
        refused = [name for name in _REFUSED if settings.get(name) not in (None, False)]
        # KV that depends on more than tokens (images, embeddings, positions) can't be found by tokens.
        refused += [name for name in kwargs.keys() - {"attention_mask"} if torch.is_tensor(kwargs[name])]
        if refused:
            return f"these arguments are not supported: {', '.join(refused)}"
        if max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1) > 1:
            return "more than one sequence is generated"
        if settings.get("use_cache") is False or settings.get("cache_implementation") is not None:
            return "the arguments disable the cache, or request another kind of cache"
        return None

    def _retrieve(self, tokens: torch.Tensor) -> DynamicCache:
        """Return a cache with the KV of the stored prefix. At least one token is left to compute."""
        try:
            kv, is_retrieved = self.engine.retrieve(tokens)
            length = min(int(is_retrieved.sum()), len(tokens) - 1)
            device = self.model.device
            return DynamicCache([tuple(x[None, :, :length].to(device) for x in layer) for layer in kv])
        except Exception as error:
            logger.warning("Computing the whole prompt: its KV could not be retrieved: %r", error)
            return DynamicCache()

    def _store(self, tokens: torch.Tensor, cache: DynamicCache) -> None:
        """Store the prompt's KV. The engine skips chunks that it has."""
        try:
            kv = tuple((x.keys[0, :, : len(tokens)], x.values[0, :, : len(tokens)]) for x in cache.layers)
            self.engine.store(tokens, kv)
        except Exception as error:
            logger.warning("The prompt's KV could not be stored: %r", error)


def _listed(tokens: int | list[int] | torch.Tensor | None) -> list[int]:
    return [] if tokens is None else torch.as_tensor(tokens).flatten().tolist()


def obstacle_of_model(model: PreTrainedModel) -> str | None:
    """Return why this model's KV can't be cached; None if it can."""
    config, layers = model.config, DynamicCache(config=model.config).layers
    is_plain = layers and all(type(layer) is DynamicLayer for layer in layers)
    if config.is_encoder_decoder or not is_plain:
        return "the model has an encoder, sliding windows or layers without KV"
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", None):
        return "the model's tokens attend to later ones"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "the model has a learned prompt before every prompt (PEFT)"
    if model.training:
        return "the model is in training mode: call its eval()"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model's layers are on several devices"
    return None
