"""SGLang's options as the engine uses them, and our settings."""

import json
from types import SimpleNamespace

import pytest

from lmcache_client.core.settings import read_settings
from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang.options import MODULE, EngineOptions, SGLangSettings
from lmcache_client.sglang.support import check_version

OURS = json.dumps({"backend_name": "lmcache", "module_path": MODULE})


class Strict:
    """Resolved options that raise another error for options they do not have."""

    def __init__(self, error, **values):
        self._error, self._values = error, values

    def __getattr__(self, name):
        if name not in self._values:
            raise AttributeError(name) if name == "kernel" else self._error(name)
        return self._values[name]


@pytest.fixture
def engine(give_module):
    def make(server_args, **accessors):
        context = give_module(
            "sglang.srt.runtime_context",
            get_server_args=lambda: server_args,
            **{name: (lambda value=value: value) for name, value in accessors.items()},
        )
        give_module("sglang.srt", runtime_context=context)
        return EngineOptions()

    return make


def test_resolved_values_take_precedence_over_given_ones(engine):
    given = SimpleNamespace(dtype="auto", model_path="m", attention_backend=None)
    kernel = SimpleNamespace(attention_backend="fa3")
    resolved = {"get_model": SimpleNamespace(dtype="bfloat16"), "get_exec": SimpleNamespace(kernel=kernel)}
    options = engine(given, **resolved)
    assert (options.dtype, options.model_path, options.attention_backend) == ("bfloat16", "m", "fa3")


@pytest.mark.parametrize("error", [AttributeError, KeyError, RuntimeError])
def test_sources_without_an_option_are_passed_over(engine, error):
    options = engine(SimpleNamespace(dtype="auto"), get_lora=Strict(error), get_model=Strict(error))
    assert options.dtype == "auto"
    with pytest.raises(AttributeError, match="SGLang has no option colour"):
        options.colour  # noqa: B018


@pytest.mark.parametrize(
    ("backend", "config", "is_ours"),
    [
        ("dynamic", OURS, True),
        *(("dynamic", other, False) for other in ('{"module_path": "mooncake"}', "{}", "[1]", "{", None)),
        *((backend, OURS, False) for backend in ("file", None)),
        ("dynamic", "@/no/such/file.yaml", False),
        ("dynamic", "@ours", True),
        ("dynamic", "@other", False),
    ],
)
def test_backend_of_the_start(engine, tmp_path, monkeypatch, backend, config, is_ours):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ours").write_text(f"module_path: {MODULE}")
    (tmp_path / "other").write_text("module_path: other")
    given = SimpleNamespace(hicache_storage_backend=backend, hicache_storage_backend_extra_config=config)
    assert engine(given).loads_backend_at_start is is_ours


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("copy_threads", threads) for threads in (0, 65)),
        *(("lookup_seconds", seconds) for seconds in (0, 9)),
        *(("row_seconds", seconds) for seconds in (-1, 9)),
        ("load_seconds", 8.1),
        *(("lease_seconds", seconds) for seconds in (3601, "soon")),
        ("min_page_tokens", 0),
        ("prefill_tokens_per_second", -1),
    ],
)
def test_wrong_values_are_refused(name, value):
    with pytest.raises(UnsupportedError, match=rf"lmcache\.{name}: '{value}' is not"):
        read_settings(SGLangSettings, {f"lmcache.{name}": value})


@pytest.mark.parametrize("version", ["0.5.2", "0.5.24", "0.5.230", "0.6.0"])
def test_only_the_supported_version_is_accepted(version):
    for supported in ("0.5.23", "0.5.23.post1", "0.5.23+cu128"):
        check_version(supported)
    with pytest.raises(UnsupportedError, match=f"SGLang {version} is not supported"):
        check_version(version)
