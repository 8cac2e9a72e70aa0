"""The namespace of an engine: what changes KV changes it, and nothing else does."""

import hashlib
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch

from lmcache_client.core import files
from lmcache_client.errors import UnnamedError
from lmcache_client.sglang import attach, naming
from lmcache_client.sglang.weights import WATCH
from lmcache_store import keys

SIZES = {"page_tokens": 64, "tensor_parallel": 1, "pipeline_parallel": 1, "context_parallel": 1}
CONFIG = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "max_position_embeddings": 4096}


def options(**fields):
    """SGLang's options."""
    defaults = {
        "model_path": "/models/llama", "revision": None, "download_dir": None, "load_format": "auto",
        "json_model_override_args": "{}", "context_length": None, "dtype": "bfloat16", "quantization": None,
        "kv_cache_dtype": "auto", "quantization_param_path": None, "lora_paths": None,
        "weight_cache_mode": "off", "port": 30000, "random_seed": 1, "hicache_host_memory_mode": "cache",
    }  # fmt: skip
    return SimpleNamespace(**(defaults | fields))


class Pool:
    """A host pool of SGLang, as far as naming reads it."""

    def __init__(self, **fields):
        defaults = {
            "layout": "page_first_direct", "page_size": 64, "dtype": torch.bfloat16, "layer_num": 2,
            "head_num": 8, "head_dim": 64, "v_head_dim": 64, "kv_cache_dim": None, "storage_format_tag": None,
            "size": 1024, "device_capacity_tokens": 4096, "size_per_token": 10,
        }  # fmt: skip
        self.__dict__.update(defaults | fields)


class OtherPool(Pool):
    pass


@pytest.fixture(autouse=True)
def sglang(give_module, monkeypatch):
    for name in ("SGLANG_PP_LAYER_PARTITION", *naming._DEVICE_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    give_module("sglang.srt.mem_cache.utils", get_hash_str=lambda tokens, prior: f"{tokens}{prior}")
    return give_module("sglang", __version__="0.5.23")


def namespace(server_args=None, pools=None, **changes):
    fields = {"config": CONFIG, "weights": "w", "draft": "", "loras": [], "sizes": SIZES} | changes
    listing = naming.listing(server_args or options(), pools or {"kv": Pool()}, **fields)
    return keys.namespace(listing)


@pytest.fixture
def base(sglang):
    return namespace()


@pytest.mark.parametrize(
    "changes",
    [
        {"weights": "w2"},
        {"weights": None},
        {"draft": "d"},
        {"loras": [["a", "/a", "00"]]},
        {"config": CONFIG | {"rope_theta": 1e6}},
        {"config": {}},
        *({"sizes": SIZES | {name: 2}} for name in SIZES),
        *(
            {"server_args": options(**{option: value})}
            for option, value in {
                "dtype": "float16", "quantization": "fp8", "kv_cache_dtype": "fp8_e5m2",
                "speculative_algorithm": "EAGLE", "speculative_draft_kv_cache_dtype": "fp8_e5m2",
                "speculative_draft_model_quantization": "fp8", "device": "cpu", "attention_backend": "triton",
                "prefill_attention_backend": "fa3", "decode_attention_backend": "fa3",
                "enable_page_major_kv_layout": True, "enable_unified_memory": True,
                "model_impl": "transformers",  # may order the elements of a key in another way
            }.items()
        ),
        {"pools": {"kv": OtherPool()}},
        {"pools": {"swa": Pool()}},
        {"pools": {"kv": Pool(), "swa": Pool()}},
        *(
            {"pools": {"kv": Pool(**{field: value})}}
            for field, value in {
                "layout": "layer_first", "page_size": 32, "dtype": torch.float16, "layer_num": 3,
                "head_num": 4, "head_dim": 128, "v_head_dim": 32, "kv_cache_dim": 576, "index_head_dim": 128,
                "quant_block_size": 128, "temporal_state_shape": (2, 3), "conv_state_shapes": [(2, 3)],
                "conv_dtype": torch.float32, "storage_format_tag": "packed",
            }.items()
        ),
    ],
)  # fmt: skip
def test_what_changes_kv_changes_the_name(base, changes):
    assert namespace(**changes) != base


@pytest.mark.parametrize(
    "changes",
    [
        {"pools": {"kv": Pool(size=7, device_capacity_tokens=9, size_per_token=11)}},
        {"config": dict(reversed(CONFIG.items()))},
        {"config": CONFIG | {"_name_or_path": "/x", "_commit_hash": "y", "transformers_version": "5"}},
        {"sizes": dict(reversed(SIZES.items()))},
        *(
            {"server_args": options(**{option: value})}
            for option, value in {
                "model_path": "/elsewhere/llama", "revision": "main", "port": 30001, "random_seed": 2,
                "context_length": 2048, "hicache_host_memory_mode": "buffer", "max_running_requests": 4,
                "hicache_ratio": 3.0, "served_model_name": "x",
                "speculative_draft_model_path": "/another/path/of/the/draft",
            }.items()
        ),
    ],
)  # fmt: skip
def test_other_changes_do_not_change_the_name(base, changes):
    assert namespace(**changes) == base
    assert len(base) == 32


def test_modules_that_adapters_change_change_the_name():
    def adapted(loras=(["a", "/a", "00"],), **given):
        return namespace(options(**given), loras=list(loras))

    assert adapted(lora_target_modules={"q"}) != adapted(lora_target_modules={"k", "q"})
    assert adapted(lora_target_modules={"k", "q"}) == adapted(lora_target_modules={"q", "k"})
    assert adapted(experts_shared_outer_loras=True) != adapted(experts_shared_outer_loras=False)
    assert adapted((), lora_target_modules={"q"}) == adapted((), lora_target_modules={"k"})


def test_kind_of_a_second_pool_changes_the_name_and_their_order_does_not():
    pools = {"kv": Pool(), "swa": OtherPool()}
    assert namespace(pools=pools) == namespace(pools=dict(reversed(pools.items())))
    assert namespace(pools=pools) != namespace(pools={"kv": Pool(), "swa": Pool()})


def test_context_length_matters_if_rope_depends_on_it():
    config = CONFIG | {"rope_scaling": {"type": "dynamic"}}
    names = {namespace(options(context_length=length), config=config) for length in (None, 4096, 8192)}
    assert len(names) == 2, "without the option, the model's own length applies"


def test_version_and_hash_of_sglang_change_the_name(base, sglang, give_module):
    sglang.__version__ = "0.5.24"
    assert namespace() != base
    sglang.__version__ = "0.5.23"
    give_module("sglang.srt.mem_cache.utils", get_hash_str=lambda tokens, prior: "new algorithm")
    assert namespace() != base


def test_stages_with_different_layers_have_the_same_name():
    """All ranks of an engine have the same name, but the first stage may have more layers."""
    sizes = SIZES | {"pipeline_parallel": 2}
    names = {namespace(pools={"kv": Pool(layer_num=number)}, sizes=sizes) for number in (2, 3)}
    assert len(names) == 1


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        pytest.param("SGLANG_USE_HND_KVCACHE", "1", id="order of bytes on the device"),
        pytest.param("SGLANG_AITER_KV_CACHE_LAYOUT", "1", id="order of bytes on the device of AMD"),
        pytest.param("SGLANG_PP_LAYER_PARTITION", "1,3", id="division into stages"),
    ],
)
def test_variable_of_the_environment_changes_the_name(base, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    assert namespace() != base


def test_scales_of_kv_are_named_by_their_content(base, tmp_path):
    names = []
    for name, content in (("scales", "1"), ("copy", "1"), ("scales", "2")):
        (tmp_path / name).write_text(content)
        names.append(namespace(options(quantization_param_path=str(tmp_path / name))))
    assert names[0] == names[1]
    assert len({base, *names}) == 3
    with pytest.raises(UnnamedError, match="can't be read"):
        namespace(options(quantization_param_path=str(tmp_path / "missing")))


@pytest.mark.parametrize(
    "option", sorted({"forward_hooks", "kt_weight_path", "uno_lora_path", *dict(naming._OTHER_SOURCES)})
)
def test_weights_from_elsewhere_are_private(option):
    assert option in naming.private_reason(options(**{option: "x"}), is_from_start=True)
    usual = options(**{option: None})
    assert naming.private_reason(usual, is_from_start=True) == ""
    assert "running engine" in naming.private_reason(usual, is_from_start=False)
    shared = options(weight_cache_mode="client")
    assert "weight_cache_mode" in naming.private_reason(shared, is_from_start=True)


@pytest.fixture
def model(tmp_path):
    """A folder with a model, older than the engine."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def later():
    """The start of an engine that begins after all changes so far."""
    return time.time() + 60


class TestFiles:
    def test_configuration_includes_the_users_changes(self, model):
        given = options(model_path=str(model), json_model_override_args='{"rope_theta": 5}')
        assert naming.model_config(given, later()) == CONFIG | {"rope_theta": 5}

    @pytest.mark.parametrize("content", [b"{", b"", b"\xff", None])
    def test_invalid_or_missing_configuration_has_no_name(self, model, content):
        (model / "config.json").unlink()
        if content is not None:
            (model / "config.json").write_bytes(content)
        with pytest.raises(UnnamedError, match="can't be read"):
            naming.model_config(options(model_path=str(model)), later())

    def test_weights_are_named_by_their_content(self, model):
        given = options(model_path=str(model))
        first = naming.weights_fingerprint(given, later())
        (model / "model.safetensors").write_bytes(b"weights 2")
        assert naming.weights_fingerprint(given, later()) != first
        for read in (naming.model_config, naming.weights_fingerprint):
            with pytest.raises(UnnamedError, match="changed after the engine's start"):
                read(given, time.time() - 60)

    @pytest.mark.parametrize("load_format", ["dummy", "remote", "gguf", "pt"])
    def test_other_sources_of_weights_have_no_name(self, model, load_format):
        with pytest.raises(UnnamedError, match=f"load format {load_format}"):
            naming.weights_fingerprint(options(model_path=str(model), load_format=load_format), later())

    def test_draft_model_is_named_by_its_content(self, model, tmp_path):
        def name(**draft):
            return naming.draft_fingerprint(options(model_path=str(model), **draft), later())

        assert name() == name(speculative_draft_model_path=str(model)) == "", "the weights name the model"
        names = []
        for folder, content in ((tmp_path / "1", b"a"), (tmp_path / "2", b"a"), (tmp_path / "3", b"b")):
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(content)
            names.append(name(speculative_draft_model_path=str(folder)))
        assert names[0] == names[1] != names[2]
        with pytest.raises(UnnamedError):
            name(speculative_draft_model_path=str(tmp_path / "no"))

    def test_adapters_are_named_by_name_path_and_content(self, tmp_path):
        adapters = []
        for name in ("a", "b"):
            folder = tmp_path / name
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(b"same")
            adapters.append(SimpleNamespace(lora_name=name, lora_path=str(folder)))
        names = naming.adapters(options(lora_paths=adapters), later())
        assert [entry[:2] for entry in names] == [[name, str(tmp_path / name)] for name in ("a", "b")]
        assert names[0][2] == names[1][2]
        assert naming.adapters(options(lora_paths=adapters[::-1]), later()) == names
        (tmp_path / "b" / "adapter_config.json").write_text('{"r": 8}')
        assert naming.adapters(options(lora_paths=adapters), later())[1] != names[1]
        assert naming.adapters(options(), later()) == []
        adapters[0].lora_path = str(tmp_path / "missing")
        with pytest.raises((UnnamedError, OSError)):
            naming.adapters(options(lora_paths=adapters), later())


class TestHub:
    """Models of Hugging Face's hub, which SGLang downloads when it starts."""

    @pytest.fixture
    def snapshot(self, model):
        """A snapshot in the hub's cache: links to blobs, which are named by hashes of their contents."""
        content = (model / "config.json").read_bytes()
        blob = model.parent / "blobs" / hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        blob.parent.mkdir()
        (model / "config.json").rename(blob)
        (model / "config.json").symlink_to(blob)
        return model

    def test_model_that_the_start_downloads_is_identified(self, snapshot):
        """The scheduler adds the weights to the folder of the configuration."""
        began = time.time() - 60
        assert naming.model_config(options(model_path=str(snapshot)), began) == CONFIG

    def test_blob_that_was_overwritten_is_not_trusted(self, snapshot):
        (snapshot / "config.json").resolve().write_bytes(b"{}")
        with pytest.raises(UnnamedError, match="changed after the engine's start"):
            naming.model_config(options(model_path=str(snapshot)), time.time() - 60)


class TestAttachment:
    """The namespace that an engine gets in the end."""

    @pytest.fixture
    def name(self, give_module, monkeypatch):
        give_module("sglang.srt.configs.model_config", is_multimodal_model=lambda names: "VL" in str(names))
        monkeypatch.setattr(files, "process_start_time", later)
        monkeypatch.setattr(WATCH, "is_complete", True)

        def make(given, uuid=b"u" * 16):
            return attach._namespace(given, {"kv": Pool()}, uuid, SIZES)

        return make

    def test_two_engines_of_one_model_share_a_namespace(self, name, model, monkeypatch):
        first, second = (name(options(model_path=str(model)), uuid) for uuid in (b"1" * 16, b"2" * 16))
        assert (first.namespace, first.private_reason, first.config) == (second.namespace, "", CONFIG)
        monkeypatch.setattr(WATCH, "is_complete", False)
        first, second = (name(options(model_path=str(model)), uuid) for uuid in (b"1" * 16, b"2" * 16))
        assert "running engine" in first.private_reason, "its weights may have changed"
        assert first.namespace != second.namespace

    @pytest.mark.parametrize(
        ("option", "reason"),
        [
            ({"load_format": "dummy"}, "load format dummy"),
            ({"modelopt_quant": "fp8"}, "modelopt_quant"),
            ({"speculative_draft_model_path": "/no/such/draft"}, "can't be identified"),
            ({"model_path": "/no/such/model"}, "the model can't be identified"),
            ({"json_model_override_args": '{"architectures": ["QwenVL"]}'}, "images"),
            ({"lora_paths": [SimpleNamespace(lora_name="a", lora_path="/no")]}, "can't be identified"),
        ],
    )
    def test_other_engines_get_a_namespace_of_their_own(self, name, model, option, reason):
        given = options(**({"model_path": str(model)} | option))
        first, second = name(given, b"1" * 16), name(given, b"2" * 16)
        assert reason in first.private_reason
        assert first.namespace != second.namespace
        assert name(given, b"1" * 16).namespace == first.namespace, "the same in all ranks"

    def test_ranks_of_one_engine_share_an_id(self, monkeypatch):
        """The replicas of ``--dp-size`` are engines, with the same parent and the same options."""
        changes = [{}, {"port": 1}, {"random_seed": 2}, {"dp_rank": 0}, {"dp_rank": 1}]
        engines = [*((options(**change), 0) for change in changes), (options(), 1)]
        ids = [attach.engine_uuid(*engine, is_alone=False) for engine in engines]
        assert ids == [attach.engine_uuid(*engine, is_alone=False) for engine in engines]
        assert len(set(ids)) == len(engines)
        random_ids = {attach.engine_uuid(options(), 0, is_alone=True) for _ in range(3)}
        assert len(random_ids) == 3, "a single rank needs no common id"
        assert {len(uuid) for uuid in {*ids, *random_ids}} == {16}
        monkeypatch.setattr(os, "getppid", os.getpid)
        assert attach.engine_uuid(options(), 0, is_alone=False) != ids[0], "another parent"

    def test_kv_of_the_engine_includes_its_host_cache(self):
        pools = {"kv": Pool(size=5000, device_capacity_tokens=4096, size_per_token=10)}
        assert attach._kv_bytes(options(), pools) == 50_000
        assert attach._kv_bytes(options(hicache_host_memory_mode="buffer"), pools) == 40_960
