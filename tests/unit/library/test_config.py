"""Configuration from defaults, files, environment variables and the legacy form."""

import contextlib

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata, parse_local_device
from lmcache.storage_backend import CreateStorageBackend
from tests.harness.scope import examples

FIELDS = list(LMCacheEngineConfig.__dataclass_fields__)


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch):
    for name in FIELDS:
        monkeypatch.delenv(f"LMCACHE_{name.upper()}", raising=False)


@pytest.fixture
def from_text(tmp_path):
    def read(text):
        path = tmp_path / "config.yaml"
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return LMCacheEngineConfig.from_file(str(path))

    return read


def test_each_source_has_its_documented_defaults(from_text):
    rest = False, False, False, 0.15, 256, "[BLEND_SEP]", False
    assert LMCacheEngineConfig.from_defaults() == LMCacheEngineConfig(
        256, "cuda", 5, "redis://localhost:6379", "torch", *rest
    )
    for text in ("", "# nothing\n", "{}"):
        assert from_text(text) == LMCacheEngineConfig(256, None, 20, None, None, *rest)
    # Defect 18: an empty environment leaves the switches off.
    assert LMCacheEngineConfig.from_env() == LMCacheEngineConfig(256, "cpu", 5, None, None, *rest)


def test_reads_fields_from_a_file(from_text):
    config = from_text(
        "chunk_size: 512\nlocal_device: cpu\nmax_local_cache_size: 0.5\nremote_url: lm://localhost:65432\n"
        "remote_serde: cachegen\npipelined_backend: true\nblend_separator: '[X]'\nnovelty: 3\n"
    )
    assert config == LMCacheEngineConfig.from_defaults(
        512, "cpu", 0.5, "lm://localhost:65432", "cachegen", True, blend_separator="[X]"
    )


def test_warns_of_unknown_keys(from_text, capsys, monkeypatch):
    warnings = []
    monkeypatch.setattr("lmcache.config.logger.warning", lambda text, *values: warnings.append(text % values))
    from_text("chunk_sise: 12\n")
    assert "chunk_sise" in warnings[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("chunk_size: 0", "chunk_size: "),
        ("chunk_size: many", "chunk_size: "),
        ("chunk_size: true", "chunk_size: "),
        ("chunk_size: 2.5", "chunk_size: "),
        ("max_local_cache_size: .nan", "max_local_cache_size: "),
        ("max_local_cache_size: .inf", "max_local_cache_size: "),
        ("max_local_cache_size: [1]", "max_local_cache_size: "),
        ("blend_recompute_ratio: 1.5", "blend_recompute_ratio: "),
        ("blend_min_tokens: -1", "blend_min_tokens: "),
        ("pipelined_backend: maybe", "pipelined_backend: "),
        ("local_device: tpu", "Invalid local storage device"),
        ("local_device: 'file://'", "Invalid local storage device"),
        ("remote_url: localhost", "Invalid remote storage url"),
        ("remote_url: 5", "remote_url: "),
        ("- 1", "must hold keys and values"),
        ("a: [", "is not YAML"),
        ("a: \x01", "is not YAML"),
    ],
)
def test_error_names_the_invalid_file(from_text, text, message):
    with pytest.raises(ValueError, match=message) as error:
        from_text(text)
    assert "config.yaml" in str(error.value)


def test_error_does_not_show_the_url():
    with pytest.raises(ValueError, match="remote storage url") as error:
        LMCacheEngineConfig.from_legacy.__globals__["_READERS"]["remote_url"]("redis://:secret@host")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("texts", ["true False", "1 0", "Yes no", "on OFF"])
def test_defect_18_reads_switches(monkeypatch, texts, flag):
    monkeypatch.setenv("LMCACHE_PIPELINED_BACKEND", texts.split()[not flag])
    assert LMCacheEngineConfig.from_env().pipelined_backend is flag


def test_reads_all_fields_from_the_environment(monkeypatch):
    values = {
        "chunk_size": "128",
        "local_device": "/var/cache",
        "max_local_cache_size": "2.5",
        "remote_url": "redis://h:6379",
        "remote_serde": "safetensor",
        "pipelined_backend": "true",
        "save_decode_cache": "true",
        "enable_blending": "true",
        "blend_recompute_ratio": "0.3",
        "blend_min_tokens": "64",
        "blend_separator": "[S]",
        "blend_add_special_in_precomp": "true",
    }
    for name, value in values.items():
        monkeypatch.setenv(f"LMCACHE_{name.upper()}", value)
    assert LMCacheEngineConfig.from_env() == LMCacheEngineConfig(
        128, "/var/cache", 2.5, "redis://h:6379", "safetensor", True, True, True, 0.3, 64, "[S]", True
    )


@pytest.mark.parametrize(
    ("name", "text"),
    [("CHUNK_SIZE", "x"), ("ENABLE_BLENDING", "perhaps"), ("REMOTE_URL", "h"), ("LOCAL_DEVICE", "gpu")],
)
def test_error_names_the_invalid_variable(monkeypatch, name, text):
    monkeypatch.setenv(f"LMCACHE_{name}", text)
    with pytest.raises(ValueError, match=f"LMCACHE_{name}"):
        LMCacheEngineConfig.from_env()


@pytest.mark.parametrize(
    ("backend", "device", "url"),
    [
        ("cpu", "cpu", None),
        ("cuda", "cuda", None),
        ("file:///tmp/cache/", "/tmp/cache/", None),
        ("redis://localhost:6379", None, "redis://localhost:6379"),
        ("lm://10.0.0.1:65432", None, "lm://10.0.0.1:65432"),
        ("redis-sentinel://a:26379,b:26379", None, "redis-sentinel://a:26379,b:26379"),
    ],
)
def test_legacy_backend_sets_a_device_or_a_url(backend, device, url):
    config = LMCacheEngineConfig.from_legacy(backend=backend, persist_path="/ignored")
    assert (config.local_device, config.remote_url, config.remote_serde) == (device, url, "torch")


DEVICES = {text: text for text in ["cpu", "cuda", "cuda:0", "cuda:11", "/data/kv", "./kv", "kv/", "cuda/"]}
DEVICES |= {"file:///data/kv": "/data/kv", "file://kv": "./kv", "file://data/kv/": "data/kv/"}
INVALID_DEVICES = [
    "",
    "a\0/b",
    *["gpu", "CPU", "Cuda:0", "cuda:", "cuda:x", "cuda:-1", "kv", "file://", "http://h/x"],
]


@pytest.mark.parametrize(("text", "device"), DEVICES.items())
def test_all_sources_read_the_local_device_alike(text, device, from_text, monkeypatch):
    monkeypatch.setenv("LMCACHE_LOCAL_DEVICE", text)
    assert LMCacheEngineConfig.from_defaults(local_device=text).local_device == device
    assert LMCacheEngineConfig.from_legacy(backend=text).local_device == device
    assert from_text(f"local_device: {text}").local_device == device
    assert LMCacheEngineConfig.from_env().local_device == device
    assert parse_local_device(device) == device


@pytest.mark.parametrize("text", INVALID_DEVICES)
def test_refuses_invalid_local_device_without_creating_a_directory(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ValueError, match=r"Invalid local storage device: .*\(write cpu, cuda, cuda:0, or a dir"
    ):
        LMCacheEngineConfig.from_defaults(local_device=text)
    config = LMCacheEngineConfig.from_defaults(local_device="cpu", remote_url=None, remote_serde=None)
    config.local_device = text
    metadata = LMCacheEngineMetadata("m", 1, 0, "vllm", torch.half, (1, 2, 16, 1, 8))
    with pytest.raises(ValueError, match="Invalid local storage device"):
        CreateStorageBackend(config, metadata)
    assert not list(tmp_path.iterdir())


def test_expands_the_home_directory(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_local_device("~/kv") == "/home/me/kv"
    monkeypatch.setenv("LMCACHE_LOCAL_DEVICE", "~")
    assert LMCacheEngineConfig.from_env().local_device == "/home/me"


def test_null_is_empty_only_in_yaml(from_text, monkeypatch):
    assert from_text("remote_url: null\nlocal_device: ~").local_device is None
    monkeypatch.setenv("LMCACHE_REMOTE_URL", "null")
    with pytest.raises(ValueError, match="LMCACHE_REMOTE_URL"):
        LMCacheEngineConfig.from_env()


@pytest.mark.parametrize("backend", ["", "gpu", "file://", "localhost:6379", "redis://localhost"])
def test_refuses_invalid_legacy_backend(backend):
    with pytest.raises(ValueError, match="Invalid local storage device"):
        LMCacheEngineConfig.from_legacy(backend=backend)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12)
documents = st.dictionaries(
    st.sampled_from(FIELDS) | st.text(max_size=5),
    scalars | st.lists(scalars, max_size=2) | st.sampled_from(["cpu", "file:///x", "lm://h:1"]),
    max_size=6,
)


@given(st.text() | documents.map(lambda document: yaml.safe_dump(document)))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(60))
def test_any_file_gives_a_config_or_a_value_error(from_text, text):
    with contextlib.suppress(ValueError):
        config = from_text(text)
        assert config.chunk_size > 0
        assert isinstance(config.pipelined_backend, bool)


@given(
    st.dictionaries(st.sampled_from(FIELDS), st.text(st.characters(codec="utf-8", exclude_characters="\0")))
)
@settings(max_examples=examples(60))
def test_any_environment_gives_a_config_or_a_value_error(environment):
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ValueError):
        for name, text in environment.items():
            patch.setenv(f"LMCACHE_{name.upper()}", text)
        assert LMCacheEngineConfig.from_env().max_local_cache_size >= 0


@given(st.text())
def test_any_legacy_backend_gives_a_config_or_a_value_error(backend):
    with contextlib.suppress(ValueError):
        config = LMCacheEngineConfig.from_legacy(backend=backend)
        assert (config.local_device is None) != (config.remote_url is None)
