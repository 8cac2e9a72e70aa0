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
  "config get-contexts") echo local; echo production;;
esac
"""


@pytest.fixture
def calls(tmp_path, monkeypatch) -> Path:
    (tmp_path / "kubectl").write_text(KUBECTL)
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "calls"


def suggested(*words: str) -> list[str]:
    return [text.partition("\t")[0] for text in completion.complete(words).texts]


def test_commands_are_suggested_with_a_description():
    assert suggested("") == list(COMMANDS)
    assert suggested("st") == ["status"]
    assert completion.complete(["top"]).texts == [f"top\t{COMMANDS['top']}"]
    assert suggested("--v") == ["--version"]
    assert suggested("unknown", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_options_of_each_command_are_suggested(command):
    assert {"--help", "--namespace", "--context", "--kubeconfig"} <= set(suggested(command, "--"))


def test_names_of_clusters_are_suggested_once(calls):
    assert suggested("status", "") == ["demo", "other"]
    assert suggested("top", "--once", "d") == ["demo"], "a flag takes no value"
    assert suggested("top", "-n", "team", "--context=local", "d") == ["demo"]
    assert suggested("status", "demo", "") == []
    assert calls.read_text().splitlines()[-1] == (
        "get lmcacheclusters --request-timeout=2s --output=name --namespace=team --context=local"
    )


def test_values_of_options_are_suggested(calls):
    assert suggested("status", "-n", "t") == ["team"]
    assert suggested("status", "--namespace=d") == ["default"]
    assert suggested("status", "--context", "") == ["local", "production"]
    assert suggested("status", "--output", "") == ["table", "json", "yaml"]
    assert suggested("top", "--sort", "req") == ["requests"]


def test_files_are_left_to_the_shell_and_no_kubectl_gives_no_suggestions(tmp_path, monkeypatch):
    assert completion.complete(["status", "--kubeconfig", ""]) == ((), 0)
    assert completion.complete(["top", "--interval", ""]) == ((), 4)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert suggested("status", "") == []


def test_program_prints_suggestions_and_the_directive_without_a_client():
    code = (
        "import sys; from lmcache_cli import completion\n"
        "completion.complete(['']); completion.complete(['top', '--']); completion.complete(['report', ''])\n"
        "print(sorted({'kubernetes', 'kopf'} & set(sys.modules)))\n"
        "sys.argv = ['x', 'stat']; completion.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY, check=True,
        env={"PYTHONPATH": SOURCES},
    )  # fmt: skip
    assert done.stdout == f"[]\nstatus\t{COMMANDS['status']}\n:4\n"
