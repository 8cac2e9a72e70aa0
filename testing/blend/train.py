"""The small model: a Llama with 1 million weights that looks facts up in documents, and its training.

    python -m testing.blend.train    # train it again after a change of the recipe, 2-5 min

Two choices make it learn fast. Training starts with short documents. Two extra losses define the task of the
first layers: after the first layer a value knows its key, and after the second layer ``<same>`` knows its
value.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from testing.blend import prompts
from testing.blend.prompts import FULL, Size

WEIGHTS_FILE = Path(__file__).with_name("little.safetensors")
"""The trained weights, in float16. Training them in each test run would take longer than the tests."""
COURSE = ((350, 48, Size(2, 4)), (100, 24, Size(3, 16)), (150, 12, FULL))
"""Steps, lessons of each step, size of the documents."""
LEARNING_RATE, WARM_UP_STEPS = 1.5e-3, 40
WEIGHTS = {"text": 0.5, "key": 1.0, "same": 1.0, "answer": 3.0}
"""Weights of the losses."""
CONFIG = LlamaConfig(
    vocab_size=prompts.VOCAB_SIZE,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
)


def trained_model() -> LlamaForCausalLM:
    """The trained model in float32. Raises RuntimeError if the recipe has changed since the training."""
    with safe_open(WEIGHTS_FILE, framework="pt") as file:
        if (file.metadata() or {}).get("recipe") != _recipe():
            raise RuntimeError(f"{WEIGHTS_FILE.name} has another recipe: run python -m testing.blend.train")
        weights = {name: file.get_tensor(name).float() for name in file.keys()}  # noqa: SIM118  (no mapping)
    model = LlamaForCausalLM(CONFIG)
    model.load_state_dict(weights, strict=False)  # the head shares the tensor of the embedding
    return model.eval()


def _recipe() -> str:
    """A digest of everything that the weights depend on."""
    config = {key: value for key, value in CONFIG.to_diff_dict().items() if key != "transformers_version"}
    settings = json.dumps([COURSE, LEARNING_RATE, WARM_UP_STEPS, WEIGHTS, config], sort_keys=True)
    parts = (settings.encode(), prompts.TEXT.encode(), Path(prompts.__file__).read_bytes())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _train() -> LlamaForCausalLM:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    model = LlamaForCausalLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.05)
    num_steps = sum(steps for steps, _, _ in COURSE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP_STEPS, max(0.05, 1 - step / num_steps))
    )
    for steps, batch, size in COURSE:
        for step in range(steps):
            losses = _losses(model, *zip(*(prompts.lesson(rng, size) for _ in range(batch)), strict=True))
            optimizer.zero_grad()
            torch.stack([weight * losses[part] for part, weight in WEIGHTS.items()]).sum().backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if step % 50 == 49:
                losses_text = "  ".join(f"{part} {loss:.3f}" for part, loss in losses.items())
                print(
                    f"{size.num_words:3} words, step {step + 1:4}: {losses_text}", file=sys.stderr, flush=True
                )
    return model


def _losses(
    model: LlamaForCausalLM, tokens: tuple[list[int], ...], expected: tuple[list[int], ...]
) -> dict[str, torch.Tensor]:
    inputs, targets = torch.tensor(tokens), torch.tensor(expected)
    previous = inputs.roll(1, dims=1)
    output = model(input_ids=inputs, use_cache=False, output_hidden_states=True)
    first, second = (model.model.norm(output.hidden_states[layers]) for layers in (1, 2))
    in_questions = (inputs == prompts.ASK).cumsum(1) > 0
    is_same = inputs == prompts.SAME
    is_value = _is_key(previous) & ~in_questions
    is_question_key = _is_key(inputs) & in_questions
    is_text = ~in_questions & ~is_same
    return {
        "text": cross_entropy(output.logits[is_text], targets[is_text]),
        "key": cross_entropy(model.lm_head(first[is_value]), previous[is_value]),
        "same": cross_entropy(model.lm_head(second[is_same]), targets[is_same]),
        "answer": cross_entropy(output.logits[is_question_key], targets[is_question_key]),
    }


def _is_key(tokens: torch.Tensor) -> torch.Tensor:
    return (tokens >= prompts.FIRST_KEY) & (tokens < prompts.NO_VALUE)


def main() -> None:
    model = _train()
    # The head shares its tensor with the embedding, and a safetensors file holds each tensor once.
    weights = {name: tensor.half() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, WEIGHTS_FILE, metadata={"recipe": _recipe()})


if __name__ == "__main__":
    main()
