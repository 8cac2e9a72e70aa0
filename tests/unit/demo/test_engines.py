"""Kinds of engines in the demo: ``--kind`` chooses one, and its packages are installed first."""

import os
import subprocess
import sys

import pytest

from demo import engine, engines, start
from testing.packages import InstallationError
from testing.sglang import environment


@pytest.fixture
def set_arguments(monkeypatch):
    def set_argv(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])

    return set_argv


def test_kind_survives_the_set_up(set_arguments, monkeypatch):
    set_arguments("engine", "--kind", "sglang")
    commands = []
    is_set_up = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: is_set_up)
    monkeypatch.setattr(os, "execv", lambda _, argv: commands.append(argv))
    monkeypatch.setattr(start, "build", lambda: pytest.fail("the engine part builds nothing"))
    monkeypatch.setattr(start, "expected", lambda *_, **__: "")
    start.main()
    assert commands[0][1:] == ["-m", "demo", "engine", "--kind=sglang"]
    set_arguments("engine")
    assert start.arguments(None).kind == "vllm"
    assert set(start.KINDS) == set(engines.KINDS)


def test_demo_ends_with_the_remedy_if_sglang_cannot_be_installed(monkeypatch):
    def fail() -> None:
        raise InstallationError("Check the access to the package index.")

    monkeypatch.setattr(environment, "prepare", fail)
    with pytest.raises(SystemExit, match="Check the access"):
        engines.SGLang().prepare()


@pytest.mark.parametrize("kind", engines.KINDS.values(), ids=engines.KINDS)
def test_prompts_consist_of_whole_rows(kind):
    """Otherwise the demo would wait for the wrong number of rows."""
    assert engine.PROMPT_TOKENS % kind.chunk_tokens == 0
    assert engine.WARM_UP_TOKENS % kind.chunk_tokens == 0
