"""Tokens for pages, in a directory that changes while the sidecar runs."""

import asyncio
from http import HTTPStatus
from pathlib import Path

import pytest

from lmcache_sidecar.config import Config, ConfigReading
from lmcache_sidecar.daemon import Daemon
from lmcache_sidecar.pages.http import Page
from lmcache_sidecar.pages.tokens import PageTokens

FIRST, SECOND = "first-token-of-a-secret", "second_token+of/a~secret=="


def is_accepted(tokens: PageTokens, token: str) -> bool:
    tokens.follow()
    page = tokens.refusal(token)
    assert page is None or page.status is HTTPStatus.UNAUTHORIZED
    return page is None


def test_each_file_has_an_accepted_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "token").write_text(f"{FIRST}\n")
    (tmp_path / "operator").write_text(SECOND)
    (tmp_path / "..data").mkdir()
    tokens = PageTokens(str(tmp_path))
    assert is_accepted(tokens, FIRST)
    assert is_accepted(tokens, SECOND)
    for other in ("", FIRST[:-1], f"{FIRST}x", FIRST.upper(), "\xe9" * 20):
        assert not is_accepted(tokens, other)
    assert FIRST not in caplog.text


def test_changed_file_replaces_its_token(tmp_path: Path) -> None:
    file, tokens = tmp_path / "token", PageTokens(str(tmp_path))
    file.write_text(FIRST)
    assert is_accepted(tokens, FIRST)
    file.write_text(SECOND)
    assert is_accepted(tokens, SECOND)
    assert not is_accepted(tokens, FIRST)


@pytest.mark.parametrize("content", [b"", b"short", b"two tokens of a secret", b"\xff" * 20, b"a" * 20_000])
def test_invalid_file_changes_nothing(tmp_path: Path, content: bytes) -> None:
    file, tokens = tmp_path / "token", PageTokens(str(tmp_path))
    file.write_bytes(content)
    assert not is_accepted(tokens, content.decode("latin-1").strip())
    assert str(tmp_path) in tokens.problem
    file.write_text(FIRST)
    assert is_accepted(tokens, FIRST)
    assert not tokens.problem
    file.write_bytes(content)
    assert is_accepted(tokens, FIRST)


@pytest.mark.parametrize("exists", [False, True])
def test_no_token_is_accepted_without_a_file(tmp_path: Path, exists: bool) -> None:
    tokens = PageTokens(str(tmp_path if exists else tmp_path / "missing"))
    assert not is_accepted(tokens, "")
    assert tokens.problem


def test_token_is_accepted_from_the_first_request(tmp_path: Path) -> None:
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "token").write_text(FIRST)

    async def first_answer() -> Page | None:
        config = Config(http_host="127.0.0.1", http_port=0, http_tokens_dir=str(tmp_path / "tokens"))
        daemon = Daemon(ConfigReading(config))
        await daemon._listen(config)
        try:
            return daemon._guard("/metrics", FIRST)
        finally:
            await daemon.stop()

    assert asyncio.run(first_answer()) is None


def test_pages_need_no_token_without_a_directory() -> None:
    assert PageTokens("").refusal("") is None
