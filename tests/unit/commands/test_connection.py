"""Commands with wrong names, broken kubeconfigs, and servers that are no API server."""

import argparse
import asyncio
import gc
import io
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.__main__ import main
from lmcache_cli.commands import connection
from lmcache_cli.commands.connection import ApiConnection, reported, run
from lmcache_operator.errors import NotFoundError
from lmcache_operator.kube import watch
from tests.harness.commands.json_server import JsonHandler, serving

CONFIG: dict[str, Any] = {
    "current-context": "c",
    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:1"}}],
    "users": [{"name": "u", "user": {}}],
}


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that KUBECONFIG names. It leads to a port on which nothing listens."""
    file = tmp_path / "kubeconfig"
    file.write_text(json.dumps(CONFIG))
    monkeypatch.setenv("KUBECONFIG", str(file))
    return file


def lead_to(kubeconfig: Path, server: str) -> None:
    clusters = [{"name": "c", "cluster": {"server": server}}]
    kubeconfig.write_text(json.dumps(CONFIG | {"clusters": clusters}))


@pytest.mark.parametrize(
    "name", ["", "a/b", "demo/status", "demo?watch=1", "../x", "a b", "Ä", "-", "x" * 254]
)
@pytest.mark.parametrize("command", ["status", "top", "explain", "hints", "report", "doctor", "curve"])
def test_names_cannot_be_paths_of_the_api_server(kubeconfig, capsys, command: str, name: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([command, "--", name])
    assert stopped.value.code == 2
    assert "is not the name of an object" in capsys.readouterr().err
    if name:
        with pytest.raises(SystemExit):
            main([command, "demo", f"--namespace={name}"])


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{}", b"[1", b"text", b"\xff\xfe\x00", b"users: null\ncurrent-context: c",
        json.dumps(CONFIG | {"contexts": None}).encode(),
        json.dumps(CONFIG | {"contexts": [{"name": "c", "context": "x"}]}).encode(),
        json.dumps(CONFIG | {"users": [{"name": "u", "user": {"tokenFile": "/missing"}}]}).encode(),
    ],
)  # fmt: skip
def test_broken_kubeconfig_is_named_in_one_line(kubeconfig, capsys, content: bytes) -> None:
    kubeconfig.write_bytes(content)
    assert main(["status", "demo"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {kubeconfig}: ")
    assert "kubectl config view" in line


def test_missing_kubeconfig_is_named(kubeconfig, capsys, caplog) -> None:
    kubeconfig.unlink()
    assert main(["status", "demo"]) == 2
    assert not caplog.records, "without a handler, a warning of the client is a line of its own"
    assert capsys.readouterr().err == (
        f"error: {kubeconfig}: there is no such file. Name your kubeconfig with --kubeconfig or KUBECONFIG\n"
    )


@pytest.mark.parametrize(
    ("words", "changes", "sentence"),
    [
        (["--context", "prdo"], {}, "there is no context 'prdo': it has c, staging"),
        ([], {"current-context": "old"}, "there is no context 'old': it has c, staging"),
        ([], {"current-context": ""}, "it has no present context: choose c, staging with --context"),
        (["--context", "prdo"], {"contexts": []}, "there is no context 'prdo': it has none"),
    ],
)
def test_unknown_context_lists_the_contexts(kubeconfig, capsys, words, changes, sentence) -> None:
    contexts = [*CONFIG["contexts"], {"name": "staging", "context": {"cluster": "c", "user": "u"}}]
    kubeconfig.write_text(json.dumps(CONFIG | {"contexts": contexts} | changes))
    assert main(["status", *words]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {kubeconfig}: {sentence}. ")


@pytest.mark.parametrize("words", [["status"], ["status", "demo"], ["explain"], ["doctor"], ["report"]])
def test_unreachable_api_server_is_named_with_its_context(kubeconfig, capsys, words) -> None:
    assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: context c (http://127.0.0.1:1): ")
    assert "Cannot connect to host 127.0.0.1:1" in line
    assert line.endswith(". Check that this machine reaches it: kubectl --context=c cluster-info")


def test_commands_to_paste_reach_the_same_api_server(kubeconfig, capsys) -> None:
    name, file = "a b; reboot", kubeconfig.with_name("my config")
    contexts = [{"name": name, "context": {"cluster": "c", "user": "u"}}]
    file.write_text(json.dumps(CONFIG | {"contexts": contexts}))
    assert main(["status", "--kubeconfig", str(file), "--context", name]) == 2
    command = f"kubectl --kubeconfig='{file}' --context='{name}' cluster-info\n"
    assert capsys.readouterr().err.endswith(command)


def api_server(namespaces: int, clusters: Any = ()) -> type[JsonHandler]:
    """Return an API server whose answer about a namespace has this status. The clusters are in each."""

    class Handler(JsonHandler):
        def do_GET(self) -> None:
            is_list = self.path.partition("?")[0].endswith("lmcacheclusters")
            if self.path.endswith("/v1alpha1"):
                self.answer({"resources": [{"name": "lmcacheclusters"}]})
            elif is_list:
                self.answer({"items": clusters, "metadata": {}})
            else:
                is_namespace = self.path.startswith("/api/v1/namespaces/")
                self.answer({"message": "no", "reason": "No"}, namespaces if is_namespace else 404)

    return Handler


@pytest.mark.parametrize(
    ("status", "words", "sentence"),
    [
        (404, ["status"], "there is no namespace nosuch: `kubectl get namespaces` lists all"),
        (404, ["status", "demo"], "there is no namespace nosuch: `kubectl get namespaces` lists all"),
        (404, ["top", "--once"], "there is no namespace nosuch: `kubectl get namespaces` lists all"),
        (
            200,
            ["status"],
            "namespace nosuch has no LMCacheCluster: `kubectl get lmcacheclusters -A` lists all",
        ),
        (403, ["status", "demo"], "there is no LMCacheCluster demo in namespace nosuch: `kubectl get"),
    ],
)
def test_misspelt_namespace_is_named(kubeconfig, capsys, status, words, sentence) -> None:
    with serving(api_server(status)) as server:
        lead_to(kubeconfig, f"http://127.0.0.1:{server.server_port}")
        assert main([*words, "-n", "nosuch"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: context c (http://127.0.0.1:{server.server_port}): {sentence}")


def test_read_that_only_explains_an_error_has_a_limit(kubeconfig, capsys, monkeypatch) -> None:
    is_over, answered = threading.Event(), list[str]()

    class Slow(api_server(404)):
        def do_GET(self) -> None:
            if self.path.startswith("/api/v1/namespaces/"):
                is_over.wait(60)
                answered.append(self.path)
            super().do_GET()

    monkeypatch.setattr(connection, "_FIRST_SECONDS", 1.0)
    with serving(Slow) as server:
        lead_to(kubeconfig, f"http://127.0.0.1:{server.server_port}")
        assert main(["status", "-n", "nosuch"]) == 2
        assert not answered  # the command ended before the slow answer
        is_over.set()
    assert "namespace nosuch has no LMCacheCluster" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["status"], ["status", "demo"], ["explain"], ["top", "--once"], ["report"]]
)
def test_kubernetes_without_an_installation_is_named(kubeconfig, capsys, words) -> None:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.send_error(404)

    with serving(Handler) as server:
        lead_to(kubeconfig, f"http://127.0.0.1:{server.server_port}")
        assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: context c (http://127.0.0.1:{server.server_port}): LMCache Cluster is not installed in this "
        "Kubernetes cluster: `kubectl lmcache doctor` says what to do"
    )


def test_empty_variable_counts_as_none(tmp_path) -> None:
    """In a process of its own, because the client reads the variable at import."""
    (tmp_path / ".kube").mkdir()
    (tmp_path / ".kube" / "config").write_text("text")
    words = [sys.executable, "-m", "lmcache_cli", "status", "demo"]
    environment = {**os.environ, "KUBECONFIG": "", "HOME": str(tmp_path)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert "error: ~/.kube/config: it is not a valid kubeconfig" in done.stderr


@pytest.mark.parametrize("body", [b"<html>Log in</html>", b"[1, 2]", b"{}", b'"text"', b"\xff"])
@pytest.mark.parametrize("words", [["status", "demo"], ["status"], ["top", "--once"], ["report", "demo"]])
def test_server_that_is_no_api_server_is_an_error(kubeconfig, capsys, words: list[str], body: bytes) -> None:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

    with serving(Handler) as server:
        lead_to(kubeconfig, f"http://127.0.0.1:{server.server_port}")
        assert main(words) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "does not answer like a Kubernetes API server" in line


@pytest.mark.parametrize("words", [["status", "demo"], ["status"], ["top", "--once"], ["doctor"]])
def test_api_server_that_hangs_is_an_error(kubeconfig, capsys, words: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        lead_to(kubeconfig, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert main(words) == 2
    assert "no answer within" in capsys.readouterr().err


def test_namespace_of_a_pod_is_that_of_its_service_account(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setattr(watch, "_POD_NAMESPACE", tmp_path / "namespace")
    (tmp_path / "namespace").write_text("team")
    assert watch.context_of() == ("", "team")


def test_reader_that_closes_the_pipe_ends_the_command_quietly() -> None:
    code = "from lmcache_cli.commands.connection import reported; reported(lambda: print('text') or 0)"
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


def test_terminal_that_cannot_show_a_character_gets_another(monkeypatch) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", output)

    def show() -> int:
        print("a█\ud800b")
        return 0

    assert reported(show) == 0
    assert output.buffer.getvalue() == b"a??b\n"


def test_requests_of_a_command_that_fails_end_before_the_connection(kubeconfig, capsys, caplog) -> None:
    class Handler(JsonHandler):
        def do_GET(self) -> None:
            self.answer({"items": []})

    abandoned = list[str]()

    async def command(connected: ApiConnection) -> int:
        read = connected.api.read("/version", seconds=60, max_bytes=1 << 20)
        abandoned.append(asyncio.create_task(read).get_name())
        raise NotFoundError("not found")

    with serving(Handler) as server:
        lead_to(kubeconfig, f"http://127.0.0.1:{server.server_port}")
        assert run(argparse.Namespace(kubeconfig="", context="c", namespace="n"), command) == 2
    gc.collect()
    assert capsys.readouterr().err.endswith("not found\n")
    assert (len(abandoned), caplog.records) == (1, [])
