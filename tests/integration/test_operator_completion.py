"""kubectl finds the plugin and its completion, and a real bash completes its words."""

from __future__ import annotations

import subprocess

import pytest

from testing.child_process import wait_until
from tests.harness.kube import CLUSTERS, NAME, example
from tests.harness.plugin import Plugin
from tests.harness.tmux import Tmux

pytestmark = [pytest.mark.kube, pytest.mark.usefixtures("no_operator")]

BASH_COMPLETION = "/usr/share/bash-completion/bash_completion"
"""The package bash-completion. The completion of kubectl needs it."""


@pytest.fixture
def kubectl(plane, namespace, tmp_path) -> Plugin:
    plane.api.create(CLUSTERS, example(), namespace)
    return Plugin(plane, tmp_path, namespace)


def run(kubectl: Plugin, *words: str) -> str:
    done = subprocess.run(
        ["kubectl", *words], env=kubectl.environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def suggested(kubectl: Plugin, *words: str) -> list[str]:
    *lines, directive = run(kubectl, "__complete", "lmcache", *words).splitlines()
    assert directive == ":4"
    return [line.partition("\t")[0] for line in lines]


def test_kubectl_lists_the_plugin(kubectl, plane, tmp_path):
    # An installation of this project may be elsewhere on the PATH. kubectl would report the second plugin.
    kubectl.environment["PATH"] = f"{plane.bin}:{tmp_path}:/usr/bin:/bin"
    assert f"{tmp_path}/kubectl-lmcache" in run(kubectl, "plugin", "list").splitlines()


def test_kubectl_completes_commands_names_and_namespaces(kubectl, namespace):
    assert suggested(kubectl, "stat") == ["status"]
    assert "--output" in suggested(kubectl, "status", "--o")
    assert suggested(kubectl, "status", "-n", namespace, "") == [NAME]
    assert suggested(kubectl, "status", "-n", namespace[:-1]).count(namespace) == 1
    assert suggested(kubectl, "status", "--context", "") == ["local"]


def test_bash_completes_a_command_and_a_name(kubectl, namespace):
    with Tmux(120, 20, kubectl.environment) as terminal:
        terminal.run(f"source {BASH_COMPLETION}; source <(kubectl completion bash); echo sour''ced")
        terminal.wait_for("sourced")
        terminal.type("kubectl lmcache stat")
        terminal.press("Tab")
        terminal.wait_for("kubectl lmcache status")
        terminal.type(f"-n {namespace} {NAME[:3]}")
        terminal.press("Tab")
        wait_until(lambda: f"status -n {namespace} {NAME}" in terminal.text, what="the name is completed")
