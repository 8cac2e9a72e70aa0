"""Namespaces: what changes the bytes of KV changes the fingerprint, and nothing else does."""

import json
import struct
from types import SimpleNamespace

import pytest

from lmcache import keys
from lmcache.engines.vllm import fingerprint
from lmcache.engines.vllm.attach import Settings
from lmcache.engines.vllm.layouts import Unsupported


def safetensors(path, tensors):
    header, data = {}, b""
    for name, content in tensors.items():
        header[name] = {
            "dtype": "U8",
            "shape": [len(content)],
            "data_offsets": [len(data), len(data) + len(content)],
        }
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.fixture
def model(tmp_path):
    safetensors(tmp_path / "model-1.safetensors", {"a": b"1" * 9000, "b": b"2" * 10})
    safetensors(tmp_path / "model-2.safetensors", {"c": b"3" * 10})
    return tmp_path


def test_weights_have_one_fingerprint_wherever_they_lie(model, tmp_path_factory):
    copy = tmp_path_factory.mktemp("copy")
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert fingerprint.weights_fingerprint(copy) == fingerprint.weights_fingerprint(model)


@pytest.mark.parametrize("tensor", ["a", "b"])
def test_a_change_of_any_tensor_changes_it(model, tensor):
    before = fingerprint.weights_fingerprint(model)
    tensors = {"a": b"1" * 9000, "b": b"2" * 10}
    tensors[tensor] = b"x" + tensors[tensor][1:]
    safetensors(model / "model-1.safetensors", tensors)
    assert fingerprint.weights_fingerprint(model) != before


def test_a_blob_s_name_is_its_hash(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    prints = []
    for name in ("a" * 64, "b" * 64):
        (snapshot / "model.safetensors").unlink(missing_ok=True)
        (snapshot / "model.safetensors").symlink_to(f"../blobs/{name}")  # not even read
        prints.append(fingerprint.weights_fingerprint(snapshot))
    assert None not in prints
    assert len(set(prints)) == 2


@pytest.mark.parametrize(
    "content", [b"", b"1234567", struct.pack("<Q", 1 << 60), struct.pack("<Q", 9) + b"not json!"]
)
def test_broken_or_missing_weights_have_none(tmp_path, content):
    assert fingerprint.weights_fingerprint(tmp_path) is None
    (tmp_path / "model.safetensors").write_bytes(content)
    assert fingerprint.weights_fingerprint(tmp_path) is None


def test_adapters(model):
    def lora(path):
        return fingerprint.lora_fingerprint(SimpleNamespace(lora_path=str(path)))

    assert fingerprint.lora_fingerprint(None) == b""
    assert lora(model) is None, "without its configuration (rank, alpha) an adapter is not known"
    (model / "adapter_config.json").write_text('{"r": 8}')
    first = lora(model)
    assert len(first) == 32
    (model / "adapter_config.json").write_text('{"r": 16}')
    assert lora(model) not in (None, first)
    assert lora("someone/repository") is None


def engine(algorithm="sha256_cbor", load_format="auto", **cache):
    return SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo=algorithm, cache_dtype="auto", **cache),
        load_config=SimpleNamespace(load_format=load_format),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
            max_model_len=100,
            dtype="float32",
            quantization=None,
        ),
    )


def test_keys_are_shared_only_when_every_process_makes_the_same(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert fingerprint.private_reason(engine(), "w", has_fixed_hash_seed=False) == ""
    for config, weights, reason in [
        (engine("sha256"), "w", "sha256_cbor"),
        (engine("xxhash_cbor"), "w", "sha256_cbor"),
        (engine(load_format="dummy"), "w", "dummies"),
        (engine(), None, "fingerprinted"),
        (engine(calculate_kv_scales=True), "w", "scales"),
    ]:
        assert reason in fingerprint.private_reason(config, weights, has_fixed_hash_seed=True)
    monkeypatch.delenv("PYTHONHASHSEED")
    assert fingerprint.private_reason(engine(), "w", has_fixed_hash_seed=True) == ""
    assert "PYTHONHASHSEED" in fingerprint.private_reason(engine(), "w", has_fixed_hash_seed=False)


def test_the_listing_is_canonical_and_complete(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def namespace(change=lambda config: None, weights="w", contents=("x", "y"), grid=(256, 32, 32)):
        config = engine()
        change(config)
        return keys.namespace(fingerprint.listing(config, weights, contents, grid))

    def set_(part, name, value):
        return lambda config: setattr(getattr(config, part), name, value)

    base = namespace()
    assert namespace(contents=("y", "x", "x")) == base
    assert namespace(set_("model_config", "max_model_len", 50)) == base
    others = [
        namespace(weights="v"),
        namespace(contents=("x",)),
        namespace(grid=(512, 32, 32)),
        namespace(set_("cache_config", "cache_dtype", "fp8")),
        namespace(set_("model_config", "dtype", "bfloat16")),
        namespace(set_("model_config", "quantization", "awq")),
        namespace(set_("parallel_config", "tensor_parallel_size", 2)),
        namespace(set_("parallel_config", "pipeline_parallel_size", 2)),
        namespace(set_("model_config", "hf_config", SimpleNamespace(to_dict=lambda: {"hidden_size": 9}))),
    ]
    assert len({base, *others}) == len(others) + 1


def test_the_longest_request_counts_where_it_changes_the_rotation():
    plain, rotating = {"rope": "default"}, {"rope_scaling": {"rope_type": "longrope"}}
    assert fingerprint.effective_config(plain, 1) == fingerprint.effective_config(plain, 2)
    assert fingerprint.effective_config(rotating, 1) != fingerprint.effective_config(rotating, 2)
    renamed = plain | {"_name_or_path": "elsewhere", "transformers_version": "9"}
    assert fingerprint.effective_config(renamed, 1) == fingerprint.effective_config(plain, 1)


def test_settings(monkeypatch):
    monkeypatch.delenv("LMCACHE_SOCKET", raising=False)
    assert Settings.read({}).socket == "/run/lmcache/kvcache.sock"
    assert Settings.read({"lmcache.socket": "/s", "lmcache.chunk_tokens": 64, "other": 1}) == ("/s", 64, 0.02)
    monkeypatch.setenv("LMCACHE_SOCKET", "/env")
    assert Settings.read({"lmcache.socket": "/s"}).socket == "/env"
    for bad, said in [
        ({"lmcache.sokcet": "/s"}, "lmcache.sokcet"),
        ({"lmcache.chunk_tokens": 0}, "chunk_tokens"),
        ({"lmcache.answer_seconds": "soon"}, "answer_seconds"),
    ]:
        with pytest.raises(Unsupported, match=said):
            Settings.read(bad)
