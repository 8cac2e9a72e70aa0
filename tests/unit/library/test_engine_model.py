"""Model-based test of the engine: stores, retrieves and evictions match a dict of prefixes."""

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from lmcache.cache_engine import LMCacheEngine
from lmcache.storage_backend.evicting_backend import EvictingBackend
from tests.harness.library.dict_engine import make_engine, suffix_mask
from tests.harness.library.kv_cache import (
    CHUNK,
    FORMATS,
    LAYERS,
    DictBackend,
    cut,
    is_same,
    make_config,
    make_kv,
    make_metadata,
    make_tokens,
)
from tests.harness.scope import examples

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(
    lambda bits: torch.cat([make_tokens(CHUNK, seed=bit) for bit in bits])
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["store", "retrieve", "evict"]), PROMPTS, st.integers(0, 80), st.booleans()),
    max_size=25,
)


@settings(max_examples=examples(60))
@given(STEPS, st.sampled_from(FORMATS), st.booleans())
def test_engine_matches_a_dict_of_prefixes(steps, fmt, is_local_backend):
    """The oracle maps each prefix that ends with a chunk or with the prompt to the KV of its last chunk."""
    engine = LMCacheEngine(make_config(), make_metadata(fmt)) if is_local_backend else make_engine(fmt)
    oracle = {}
    for seed, (step, prompt, number, flag) in enumerate(steps):
        tokens = prompt[: max(1, len(prompt) - number % CHUNK)]
        ends = [*range(CHUNK, len(tokens), CHUNK), len(tokens)]
        prefixes = [tuple(tokens[:end].tolist()) for end in ends]
        num_present = next((i for i, prefix in enumerate(prefixes) if prefix not in oracle), len(prefixes))
        if step == "store":
            kv = make_kv(len(tokens), fmt, seed)
            engine.store(tokens, kv, skip_existing=flag, blocking=bool(number % 2))
            for index in range(num_present if flag else 0, len(ends)):
                oracle[prefixes[index]] = cut(kv, fmt, index * CHUNK, ends[index])
        elif step == "evict" and oracle:
            victim = sorted(oracle)[number % len(oracle)]
            del oracle[victim]
            assert isinstance(engine.engine_, EvictingBackend | DictBackend)
            engine.engine_.remove(engine._keys(torch.tensor(victim))[-1])
        else:
            assert engine.lookup(tokens) == ([0, *ends])[num_present]
            num_masked = min(number, len(tokens))
            first = num_masked // CHUNK
            expected_chunks = []
            for prefix in prefixes[first:]:
                if prefix not in oracle:
                    break
                expected_chunks.append(oracle[prefix])
            retrieved, mask = engine.retrieve(tokens, suffix_mask(len(tokens), num_masked))
            assert mask.dtype == torch.bool
            if num_masked == len(tokens) or not expected_chunks:
                assert retrieved == ()
                assert not mask.any()
                continue
            dim = FORMATS.index(fmt)
            joined = tuple(
                tuple(torch.cat([chunk[layer][part] for chunk in expected_chunks], dim) for part in (0, 1))
                for layer in range(LAYERS)
            )
            assert is_same(retrieved, cut(joined, fmt, num_masked - first * CHUNK))
            stop = num_masked + retrieved[0][0].shape[dim]
            assert mask.tolist() == [num_masked <= i < stop for i in range(len(tokens))]
