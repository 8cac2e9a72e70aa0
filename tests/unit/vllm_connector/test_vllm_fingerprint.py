"""Namespaces: what changes the bytes of KV changes the fingerprint, and nothing else does."""

import time
from types import SimpleNamespace

import pytest

from lmcache import keys
from lmcache.engines.errors import UnnamedError, UnsupportedError
from lmcache.engines.vllm import fingerprint
from lmcache.engines.vllm.attach import Settings


def engine(algorithm="sha256_cbor", load_format="auto", model=".", **cache):
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, cache_dtype="auto", **cache),
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
            max_model_len=100,
            dtype="float32",
            quantization=None,
            model=model,
            revision=None,
        ),
    )


def test_keys_are_shared_only_when_every_process_makes_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fingerprint.private_reason(engine(), has_fixed_hash_seed=False) == ""
    for algorithm in ("sha256", "xxhash_cbor"):
        assert "sha256_cbor" in fingerprint.private_reason(engine(algorithm), has_fixed_hash_seed=True)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert fingerprint.private_reason(engine(), has_fixed_hash_seed=True) == ""
    assert "PYTHONHASHSEED" in fingerprint.private_reason(engine(), has_fixed_hash_seed=False)


@pytest.mark.parametrize(
    ("load_format", "reason"),
    [("dummy", "dummies"), ("gguf", "load format gguf"), ("auto", "no safetensors")],
)
def test_weights_that_are_not_read_from_safetensors_have_no_name(tmp_path, load_format, reason):
    with pytest.raises(UnnamedError, match=reason):
        fingerprint.weights_fingerprint(engine(load_format=load_format, model=str(tmp_path)), time.time())


def test_the_files_of_a_repository_are_those_that_the_engine_loaded(tmp_path, monkeypatch):
    """``main`` may name another commit by now, and ``--download-dir`` another cache."""
    asked = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda name, **options: asked.update(options) or str(tmp_path)
    )
    config = engine(model="org/model")
    config.model_config.revision, config.load_config.download_dir = "main", "/downloads"
    assert fingerprint.model_dir(config) == tmp_path
    assert asked == {"revision": "main", "cache_dir": "/downloads", "local_files_only": True}
    config.model_config.hf_config._commit_hash = "c0ffee"
    fingerprint.model_dir(config)
    assert asked["revision"] == "c0ffee"


LAYERS = (("l0", "x"), ("l1", "y"))


def groups_of(*layers, kind="FULL_ATTENTION", window=0, block_tokens=16, is_drafter=0):
    return [([kind, window, block_tokens, is_drafter], part) for part in layers]


def test_the_listing_is_canonical_and_complete(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def namespace(
        change=lambda config: None, weights="w", shards=1, grid=(256, 32), groups=None, layers=LAYERS
    ):
        config = engine()
        change(config)
        return keys.namespace(fingerprint.listing(config, weights, groups or groups_of(layers), shards, grid))

    def set_(part, name, value):
        return lambda config: setattr(getattr(config, part), name, value)

    def draft(model, method="eagle"):
        draft_model = SimpleNamespace(model=model, revision=None)
        speculative = SimpleNamespace(method=method, draft_model_config=draft_model)
        return lambda config: setattr(config, "speculative_config", speculative)

    media = SimpleNamespace(mm_processor_kwargs={"max_pixels": 9})
    base = namespace()
    assert namespace(set_("model_config", "max_model_len", 50)) == base
    assert namespace(draft(".", "ngram")) == base, "it has no layers of its own"
    assert namespace(set_("parallel_config", "tensor_parallel_size", 2)) == base, "both ranks hold the same"
    others = [
        namespace(weights="v"),
        namespace(layers=(("l0", "y"), ("l1", "x"))),
        namespace(layers=LAYERS[:1]),
        namespace(layers=(*LAYERS, ("draft", "y"))),
        namespace(groups=groups_of(LAYERS[:1], LAYERS[1:])),
        namespace(groups=groups_of(LAYERS[1:], LAYERS[:1])),
        namespace(groups=groups_of(LAYERS, kind="SLIDING_WINDOW", window=128)),
        namespace(groups=groups_of(LAYERS, kind="SLIDING_WINDOW", window=129)),
        namespace(groups=groups_of(LAYERS, block_tokens=32)),
        namespace(groups=groups_of(LAYERS, is_drafter=1)),
        namespace(grid=(512, 32)),
        namespace(set_("cache_config", "mamba_ssm_cache_dtype", "float32")),
        namespace(set_("cache_config", "cache_dtype", "fp8")),
        namespace(set_("cache_config", "kv_cache_dtype_skip_layers", ["0", "1"])),
        namespace(set_("cache_config", "kv_cache_dtype_skip_layers", ["2", "3"])),
        namespace(set_("model_config", "dtype", "bfloat16")),
        namespace(set_("model_config", "quantization", "awq")),
        namespace(set_("model_config", "multimodal_config", media)),
        namespace(shards=2),
        namespace(set_("model_config", "hf_config", SimpleNamespace(to_dict=lambda: {"hidden_size": 9}))),
        namespace(draft("org/draft")),
    ]
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    others.append(namespace())
    assert len({base, *others}) == len(others) + 1


def test_all_pipeline_stages_make_one_listing(monkeypatch):
    cuts = [[0, 2], [2, 4]]
    monkeypatch.setattr(fingerprint, "stages", lambda config: cuts)
    config = engine()
    config.parallel_config.pipeline_parallel_size = 2
    first, last = (("l0", "x"), ("l1", "x")), (("l2", "x"), ("l3", "x"))

    def namespace(contents):
        return keys.namespace(fingerprint.listing(config, "w", groups_of(contents), 1, (256, 32)))

    before = namespace(first)
    assert namespace(last) == before
    cuts[:] = [[0, 1], [1, 4]]
    assert namespace(first) != before


def test_the_longest_request_counts_where_it_changes_the_rotation():
    plain, rotating = {"rope": "default"}, {"rope_scaling": {"rope_type": "longrope"}}
    assert fingerprint.effective_config(plain, 1) == fingerprint.effective_config(plain, 2)
    assert fingerprint.effective_config(rotating, 1) != fingerprint.effective_config(rotating, 2)
    renamed = plain | {"_name_or_path": "elsewhere", "transformers_version": "9"}
    assert fingerprint.effective_config(renamed, 1) == fingerprint.effective_config(plain, 1)


def test_settings(monkeypatch):
    monkeypatch.delenv("LMCACHE_SOCKET", raising=False)
    assert Settings.read({}).socket == "/run/lmcache/kvcache.sock"
    assert Settings.read({"lmcache.socket": "/s", "lmcache.chunk_tokens": 64, "other": 1}) == (
        "/s",
        64,
        0.0,
        0.0,
        None,
        None,
    )
    monkeypatch.setenv("LMCACHE_SOCKET", "/env")
    assert Settings.read({"lmcache.socket": "/s"}).socket == "/env"
    for bad, said in [
        ({"lmcache.sokcet": "/s"}, "lmcache.sokcet"),
        ({"lmcache.chunk_tokens": 0}, "chunk_tokens"),
        ({"lmcache.answer_seconds": "soon"}, "answer_seconds"),
        ({"lmcache.prefill_tokens_per_second": -1}, "prefill_tokens_per_second"),
        ({"lmcache.copy_threads": 0}, "copy_threads"),
        ({"lmcache.kv_cache_layout": "NHD"}, "kv_cache_layout"),
    ]:
        with pytest.raises(UnsupportedError, match=said):
            Settings.read(bad)
