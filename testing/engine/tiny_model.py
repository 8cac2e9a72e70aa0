"""A random-weight Llama of 10 MB and a tokenizer with one token for each ASCII character.

The model is generated into the cache directory, once for each content of this file. Its weights are larger
than usual random weights (``initializer_range``), so that greedy answers depend on the prompt and do not
repeat one token. ``tiny_kinds`` has models with other kinds of KV.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tools.cache import cache_root

VOCAB_SIZE = 320
MAX_TOKENS = 32768


def tiny_model() -> Path:
    """Return the model's directory. Generates the model if it is missing (5 s)."""
    return cached_model("llama", _save_weights, Path(__file__))


def cached_model(name: str, save_weights: Callable[[Path], None], *recipes: Path) -> Path:
    """Return the directory of the model that ``recipes`` describe. Generates the model if it is missing."""
    digest = hashlib.sha256(b"".join(recipe.read_bytes() for recipe in recipes)).hexdigest()[:12]
    target = cache_root() / f"tiny-{name}-{digest}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            model = Path(scratch) / "model"
            _save_tokenizer(model)
            save_weights(model)
            # The files are created readable for their owner only. A later change would look like new weights.
            for file in model.iterdir():
                file.chmod(0o644)
            try:
                model.rename(target)
            except OSError:  # another process was faster
                shutil.rmtree(model)
        # An engine shares no KV of weights that may have changed since it started. It knows its start time
        # only to a hundredth of a second.
        time.sleep(0.1)
    return target


def _save_tokenizer(target: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate(["<pad>", "<s>", "</s>", "<unk>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        model_max_length=MAX_TOKENS,
    )
    fast.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    fast.save_pretrained(target)


def _save_weights(target: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).float().save_pretrained(target)
