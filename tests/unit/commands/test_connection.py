"""Commands with wrong names, broken kubeconfigs, and servers that are no API server."""

import io
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.__main__ import main
from lmcache_cli.commands.connection import reported
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
@pytest.mark.parametrize("command", ["status", "top", "explain", "report", "doctor", "curve"])
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


def test_missing_kubeconfig_is_named(kubeconfig, capsys) -> None:
    kubeconfig.unlink()
    assert main(["status", "demo"]) == 2
    assert capsys.readouterr().err == (
        f"error: {kubeconfig}: there is no such file. Name your kubeconfig with --kubeconfig or KUBECONFIG\n"
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
    assert watch.default_namespace() == "team"


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
