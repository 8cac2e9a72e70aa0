"""Serdes accept tensors in device memory. Needs a GPU: `make gpu-check`."""

import pytest
import torch

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde import CreateSerde

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]

SHAPE = (4, 2, 256, 8, 128)


@pytest.mark.parametrize("name", ["torch", "safetensor", "fast", "cachegen"])
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
def test_tensors_on_the_gpu_are_restored_on_the_cpu(name, fmt):
    metadata = LMCacheEngineMetadata("m", 1, 0, fmt, torch.float16, SHAPE)
    serializer, deserializer = CreateSerde(name, LMCacheEngineConfig.from_defaults(), metadata)
    kv = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).half()
    if fmt == "huggingface":
        kv = kv.transpose(2, 3)
    restored = deserializer.from_bytes(serializer.to_bytes(kv.cuda()))
    assert restored.device.type == "cpu"
    if name == "cachegen":
        token = (3, 4) if fmt == "vllm" else (2, 4)
        allowed = kv.float().abs().amax(token, keepdim=True) / 30 * 1.001 + kv.float().abs() * 2**-10
        assert bool(((restored.float() - kv.float()).abs() <= allowed).all())
    else:
        assert torch.equal(restored, kv)
