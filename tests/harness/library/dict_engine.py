"""An engine over a backend with only the documented methods."""

import pytest
import torch

import lmcache.cache_engine
from lmcache.cache_engine import LMCacheEngine
from tests.harness.library.kv_cache import DictBackend, make_config, make_metadata


def make_engine(fmt: str = "vllm") -> LMCacheEngine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lmcache.cache_engine, "CreateStorageBackend", lambda *_: DictBackend())
        return LMCacheEngine(make_config(), make_metadata(fmt))


def suffix_mask(num_tokens: int, num_masked: int) -> torch.Tensor:
    return torch.arange(num_tokens) >= num_masked
