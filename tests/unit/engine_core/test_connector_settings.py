"""Settings that an engine's configuration carries."""

import math
from dataclasses import dataclass

import pytest

from lmcache_client.core.settings import TOKENS_PER_SECOND, read_settings
from lmcache_client.errors import UnsupportedError
from lmcache_store.common import options


@dataclass(frozen=True)
class Settings:
    socket: str = options.setting("/default.sock", str)
    threads: int | None = options.setting(None, options.number(int, 1, 8, "a number from 1 to 8"))
    speed: float = options.setting(0.0, TOKENS_PER_SECOND)


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("LMCACHE_SOCKET", raising=False)


def test_defaults_apply_without_settings():
    assert read_settings(Settings, {}) == Settings()


def test_settings_are_read_by_their_prefix():
    given = {"lmcache.socket": "/a.sock", "lmcache.threads": 3, "lmcache.speed": "1e4", "threads": "8"}
    assert read_settings(Settings, given) == Settings("/a.sock", 3, 10_000.0)


def test_settings_of_others_and_unset_ones_are_ignored():
    assert read_settings(Settings, {"backend_name": "x", "lmcache.threads": None}) == Settings()


def test_environment_takes_precedence_for_the_socket_only(monkeypatch):
    monkeypatch.setenv("LMCACHE_SOCKET", "/env.sock")
    monkeypatch.setenv("LMCACHE_THREADS", "7")
    settings = read_settings(Settings, {"lmcache.socket": "/a.sock", "lmcache.threads": "2"})
    assert settings == Settings("/env.sock", 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lmcache.sokcet": "/x"}, r"unknown setting lmcache\.sokcet .*; did you mean 'lmcache.socket'\?"),
        ({"lmcache.thread": "1"}, r"unknown setting lmcache\.thread \(known: lmcache\.socket, .*threads\)"),
        ({"lmcache.threads": "9"}, r"lmcache\.threads: '9' is not a number from 1 to 8"),
        ({"lmcache.threads": 1.5}, r"lmcache\.threads: '1.5' is not a number"),
        ({"lmcache.speed": -1}, r"lmcache\.speed: '-1' is not a number of tokens per second"),
        ({"lmcache.speed": math.nan}, r"lmcache\.speed: 'nan' is not"),
        ({"lmcache.socket": {"a": 1}, "lmcache.threads": []}, r"lmcache\.threads: '\[\]' is not"),
    ],
)  # fmt: skip
def test_mistakes_are_named(given, message):
    with pytest.raises(UnsupportedError, match=message):
        read_settings(Settings, given)
