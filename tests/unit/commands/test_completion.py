"""Suggestions for the words of ``kubectl lmcache``, with a stand-in for kubectl."""

import subprocess
import sys
from pathlib import Path

import pytest

from lmcache_cli import completion
from lmcache_cli.commands import COMMANDS
from testing.child_process import REPOSITORY, SOURCES

KUBECTL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
case "$1 $2" in
  "get lmcacheclusters") echo lmcachecluster.lmcache.io/demo; echo lmcachecluster.lmcache.io/other;;
  "get namespaces") echo namespace/default; echo namespace/team;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


def suggested(*words: str) -> list[str]:
    return [text.partition("\t")[0] for text in completion.suggestions(words[:-1], words[-1])]


def test_commands_are_suggested_with_a_description():
    assert completion.suggestions([], "t") == [f"{name}\t{about}" for name, about in COMMANDS.items()]
    assert suggested("unknown", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_each_command_are_suggested(command):
    assert {"--help", "--namespace", "--context", "--kubeconfig"} <= set(suggested(command, "--"))


def test_names_of_clusters_are_suggested_once(calls):
    assert suggested("status", "") == ["demo", "other"]
    assert suggested("top", "--once", "d") == ["demo", "other"], "a flag takes no value"
    assert suggested("top", "-n", "team", "--context=local", "d") == ["demo", "other"]
    assert suggested("status", "demo", "") == []
    assert calls.read_text().splitlines()[-1] == (
        "get lmcacheclusters --request-timeout=2s --output=name --namespace=team --context=local"
    )


@pytest.mark.parametrize("option", ["--help", "-h", "--o"])
def test_help_and_abbreviated_options_print_nothing(calls, capfd, option):
    assert suggested("doctor", option, "d") == ["demo", "other"]
    assert capfd.readouterr() == ("", "")


def test_values_of_options_are_suggested(calls):
    assert suggested("status", "--context", "local", "-n", "t") == ["default", "team"]
    assert calls.read_text().endswith("--output=name --context=local\n")
    assert suggested("doctor", "--operator-namespace", "") == ["default", "team"]
    assert suggested("status", "--output", "") == ["table", "json", "yaml"]
    assert "requests" in suggested("top", "--sort", "")


def test_invalid_words_and_a_missing_kubectl_give_no_suggestions(tmp_path, monkeypatch):
    assert suggested("status", "--kubeconfig", "") == [], "the shell suggests files"
    assert suggested("top", "--interval", "never", "") == []
    monkeypatch.setenv("PATH", str(tmp_path))
    assert suggested("status", "") == []


def test_program_prints_suggestions_and_the_directive_without_a_client():
    code = (
        "import sys; from lmcache_cli import completion\n"
        "completion.suggestions(['top'], '--'); completion.suggestions(['report'], '')\n"
        "print(sorted({'kubernetes', 'kopf'} & set(sys.modules)))\n"
        "sys.argv = ['x', 'stat']; completion.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True,
        env={"PYTHONPATH": SOURCES},
    )  # fmt: skip
    assert done.stdout == f"[]\nstatus\t{COMMANDS['status']}\n:0\n"
