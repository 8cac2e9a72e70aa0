"""``python -m testing.blend.experiment [--plot FILE]``: what blending does to the next token.

Each document's KV is computed alone and stored in an LMCacheEngine. Then a prompt of three documents and a
question is answered with that KV, retrieved by SPTBlendRetriever and blended by CacheBlendImpl, and the
distribution of the answer is held against that of a full prefill.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import kl_div, log_softmax
from transformers import LlamaForCausalLM

from lmcache.blend.executor import CacheBlendImpl
from lmcache.blend.interfaces import BlendExecutor, BlendOutput
from lmcache.blend.retriever import SPTBlendRetriever
from lmcache.cache_engine import LMCacheEngine
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from testing.blend import prompts
from testing.blend.forward import Forward
from testing.blend.train import trained_model

RATIOS = (0, 0.05, 0.1, 0.15, 0.25, 0.5, 1)
NOT_ROTATED = "0 %, not rotated"
ALL_LAYERS = "0 %, layers 0 and 1 reused too"
CHUNK_TOKENS = 16
SEPARATOR = prompts.VOCAB_SIZE  # no token of the model


def divergences(
    model: LlamaForCausalLM, num_prompts: int, ratios: Sequence[float] = RATIOS
) -> dict[str, np.ndarray]:
    """Return per way of reuse each prompt's KL divergence of its answer from prefill's, in nats."""
    forward = Forward(model)
    rng = np.random.default_rng(1)
    found = defaultdict(list)
    engine = _engine(forward)
    retriever = SPTBlendRetriever([SEPARATOR], engine, engine.metadata)
    for _ in range(num_prompts):
        tokens, starts = retriever.drop_spt_and_get_indices(_prompt(rng))
        prompt = torch.tensor(tokens)
        for document in prompt.tensor_split(starts)[:-1]:
            engine.store(document, forward.prefill(document)[1])
        expected = log_softmax(forward.prefill(prompt)[0][-1], dim=-1)
        for name, executor in _executors(forward, ratios).items():
            logits = forward.blended(prompt, retriever.new_request([prompt], [starts]), executor)
            answer = log_softmax(logits[-1], dim=-1)
            found[name].append(kl_div(answer, expected, log_target=True, reduction="sum").item())
    engine.close()
    return {name: np.array(values) for name, values in found.items()}


def name_of(ratio: float) -> str:
    return f"{ratio:.0%}".replace("%", " %")


def _engine(forward: Forward) -> LMCacheEngine:
    config = LMCacheEngineConfig.from_defaults(CHUNK_TOKENS, "cpu", 0.1, None, None)
    layers = forward.prefill(torch.tensor([prompts.DOC]))[1]
    shape = (len(layers), 2, CHUNK_TOKENS, *layers[0][0].shape[1:])
    return LMCacheEngine(config, LMCacheEngineMetadata("blend", 1, 0, "vllm", torch.float32, shape))


def _prompt(rng: np.random.Generator) -> list[int]:
    """Documents and a question about one of their keys, divided by separators."""
    documents = prompts.documents(rng)
    keys = list(prompts.answers(list(chain.from_iterable(documents))))
    tokens = [token for document in documents for token in (*document, SEPARATOR)]
    return [*tokens, prompts.ASK, int(rng.choice(keys))]


def _executors(forward: Forward, ratios: Sequence[float]) -> dict[str, BlendExecutor]:
    executors = {name_of(ratio): CacheBlendImpl(ratio) for ratio in ratios}
    for executor in executors.values():
        executor.set_positional_encoder(forward.rotate)
        executor.set_reverse_positional_encoder(forward.rotate_back)
    return {ALL_LAYERS: _ReuseAll(forward), NOT_ROTATED: CacheBlendImpl(0), **executors}


class _ReuseAll(CacheBlendImpl):
    """Reuses every layer, for comparison: only tokens without retrieved KV are computed, from the start."""

    def __init__(self, forward: Forward) -> None:
        super().__init__(0)
        self.set_positional_encoder(forward.rotate)
        self.set_reverse_positional_encoder(forward.rotate_back)

    def blend(self, layer_id: int, *stored_and_fresh: Any) -> BlendOutput:
        k, v, valid_mask, original_positions, fresh_q, fresh_k, fresh_v, positions, *rest = stored_and_fresh
        if layer_id == 0:
            self.indexes_in_kv = is_new = (valid_mask == 0).nonzero().squeeze(1)
            fresh_q, fresh_k, fresh_v, positions = (x[is_new] for x in (fresh_q, fresh_k, fresh_v, positions))
        stored = k, v, valid_mask, original_positions
        out = super().blend(2, *stored, fresh_q, fresh_k, fresh_v, positions, *rest)
        return replace(out, local_indices=self.indexes_in_kv) if layer_id == 0 else out


def plot(found: dict[str, np.ndarray], target: Path) -> None:
    """Draw the mean divergence by ratio, as SVG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    means = [found[name_of(ratio)].mean() for ratio in RATIOS]
    axes.plot([100 * ratio for ratio in RATIOS], means, marker="o", label="blended")
    axes.axhline(0.2 * means[0], linestyle="--", color="grey", label="20 % of ratio 0")
    axes.axhline(found[ALL_LAYERS].mean(), linestyle=":", color="red", label=ALL_LAYERS)
    axes.set(xlabel="recompute ratio, %", ylabel="KL divergence to full prefill, nats")
    axes.set_yscale("symlog", linthresh=1e-8)
    axes.set_ylim(bottom=0)
    axes.legend(loc="center right")
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--plot", type=Path, metavar="FILE")
    args = parser.parse_args()
    found = divergences(trained_model(), args.prompts)
    naive = found[name_of(0)].mean()
    print("| recomputed | KL divergence, mean | standard error | relative to 0 % |\n|---|---|---|---|")
    for name, values in found.items():
        error = values.std() / len(values) ** 0.5
        print(f"| {name} | {values.mean():.3g} | {error:.2g} | {values.mean() / naive:.3g} |")
    if args.plot:
        plot(found, args.plot)


if __name__ == "__main__":
    main()
