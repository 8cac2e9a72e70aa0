"""Namespaces: inputs that change the bytes of KV change the fingerprint, and other inputs do not."""

import time
from types import SimpleNamespace

import pytest

from lmcache_client.core import files
from lmcache_client.errors import UnnamedError, UnsupportedError
from lmcache_client.vllm import attach, fingerprint
from lmcache_client.vllm.attach import VLLMSettings
from lmcache_client.vllm.places import RankPlace
from lmcache_store import keys


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


def test_keys_are_shared_only_with_reproducible_hashes(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fingerprint.private_reason(engine(), has_fixed_hash_seed=False) == ""
    for algorithm in ("sha256", "xxhash_cbor"):
        assert "sha256_cbor" in fingerprint.private_reason(engine(algorithm), has_fixed_hash_seed=True)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert fingerprint.private_reason(engine(), has_fixed_hash_seed=True) == ""
    assert "PYTHONHASHSEED" in fingerprint.private_reason(engine(), has_fixed_hash_seed=False)


@pytest.mark.parametrize(
    ("load_format", "reason"),
    [("dummy", "load format dummy"), ("gguf", "load format gguf"), ("auto", "no safetensors")],
)
def test_weights_without_safetensors_are_refused(tmp_path, load_format, reason):
    with pytest.raises(UnnamedError, match=reason):
        fingerprint.weights_fingerprint(engine(load_format=load_format, model=str(tmp_path)), time.time())


def test_model_dir_is_the_snapshot_that_the_engine_loaded(tmp_path, monkeypatch):
    """``main`` may refer to a newer commit now, and ``--download-dir`` to a different cache."""
    download_options = {}
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **options: download_options.update(options) or str(tmp_path),
    )
    config = engine(model="org/model")
    config.model_config.revision, config.load_config.download_dir = "main", "/downloads"
    assert fingerprint.model_dir(config) == tmp_path
    assert download_options == {"revision": "main", "cache_dir": "/downloads", "local_files_only": True}
    config.model_config.hf_config._commit_hash = "c0ffee"
    fingerprint.model_dir(config)
    assert download_options["revision"] == "c0ffee"


LAYERS = (("l0", "x"), ("l1", "y"))


def groups_of(*layers, kind="FULL_ATTENTION", window=0, block_tokens=16, is_drafter=0):
    return [([kind, window, block_tokens, is_drafter], part) for part in layers]


def test_namespace_covers_all_inputs_of_kv_bytes(monkeypatch):
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
    assert namespace(draft(".", "ngram")) == base, "a drafter without layers must not change the namespace"
    assert namespace(set_("parallel_config", "tensor_parallel_size", 2)) == base, "the ranks have the same KV"
    variants = [
        namespace(weights="v"),
        namespace(layers=(("l0", "y"), ("l1", "x"))),
        namespace(layers=LAYERS[:1]),
        namespace(layers=(*LAYERS, ("draft", "y"))),
        namespace(groups=groups_of(LAYERS[:1], LAYERS[1:])),
        namespace(groups=groups_of(LAYERS[1:], LAYERS[:1])),
        *(namespace(groups=groups_of(LAYERS, kind="SLIDING_WINDOW", window=size)) for size in (128, 129)),
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
    variants.append(namespace())
    assert len({base, *variants}) == len(variants) + 1


def test_pipeline_stages_have_the_same_namespace(monkeypatch):
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


def test_max_model_len_counts_only_for_longrope():
    default_config, longrope_config = {"rope": "default"}, {"rope_scaling": {"rope_type": "longrope"}}
    assert files.effective_config(default_config, 1) == files.effective_config(default_config, 2)
    assert files.effective_config(longrope_config, 1) != files.effective_config(longrope_config, 2)
    renamed = default_config | {"_name_or_path": "elsewhere", "transformers_version": "9"}
    assert files.effective_config(renamed, 1) == files.effective_config(default_config, 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [("chunk_tokens", 0), ("answer_seconds", "soon"), ("copy_threads", 0), ("kv_cache_layout", "NHD")],
)
def test_wrong_settings_are_refused(name, value):
    with pytest.raises(UnsupportedError, match=name):
        VLLMSettings.read({f"lmcache.{name}": value})


@pytest.mark.parametrize(
    ("num_parts", "golden"),
    [
        (1, "6dfab57047c7d604bfabe4a4a631d0a5942cece72510de691fedb52faf55c34d"),
        (2, "35877214c1e1c00267d33e8f965c50da4816332150f70dfd10083c7e65367a65"),
    ],
)
def test_namespace_of_an_engine_never_changes(num_parts, golden, monkeypatch):
    # Rows in all existing tiers are lost if it changes.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT", raising=False)
    monkeypatch.setattr(fingerprint, "weights_fingerprint", lambda *_: "weights")
    place = RankPlace(0, num_parts, rank=0, num_ranks=2, owners=(0, 1))
    contents = [(["FULL_ATTENTION", 0, 16, 0], [("layer", "cpu-vec-1/float16/2x4x8/012")])]
    name, reason = attach._namespace(engine(), contents, 2, (256, 16), place)
    assert (name.hex(), reason) == (golden, "")
