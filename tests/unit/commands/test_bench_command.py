"""Errors and limits of ``kubectl lmcache bench``, through a stand-in for the API server."""

import socket
from pathlib import Path

import pytest
from lmcache_operator.__main__ import main

from tests.harness.forwarding_api import NAME, ForwardingApi, pod, served


@pytest.fixture
def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def bench(api: ForwardingApi, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    with served(api, folder) as kubeconfig:
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        return main(["bench", NAME, *options])


def test_engine_that_does_not_listen_is_an_error(tmp_path, monkeypatch, capsys, closed_port) -> None:
    options = ("--yes", "--engine-port", str(closed_port))
    assert bench(ForwardingApi([pod(0, closed_port)]), tmp_path, monkeypatch, *options) == 2
    assert "/v1/models cannot be read" in capsys.readouterr().err


def test_at_most_sixteen_pods_are_measured(tmp_path, monkeypatch, capsys, closed_port) -> None:
    api = ForwardingApi([pod(number, closed_port) for number in range(17)])
    assert bench(api, tmp_path, monkeypatch, "--yes", "--engine-url", f"http://127.0.0.1:{closed_port}") == 2
    assert "Measuring 16 of 17 ready pods." in capsys.readouterr().err
    assert api.num_forwards == 16, "one for each sidecar, because --engine-url leads to the engines"


def test_comparison_needs_no_cluster(tmp_path, capsys) -> None:
    missing = str(tmp_path / "a.json")
    assert main(["bench", "--compare", missing, missing]) == 2
    assert capsys.readouterr().err == f"error: {missing}: No such file or directory\n"
