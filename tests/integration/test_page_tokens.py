"""Tokens for a sidecar's pages: of Prometheus, and of the operator with its key on a real API server."""

import asyncio
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from lmcache_operator.app import token_key
from lmcache_operator.election import LeaseName
from lmcache_operator.kube.client import connect
from lmcache_operator.stats import StatsClient
from testing.child_process import reachable_address, wait_until
from testing.kube.cluster import Cluster
from testing.processes import SidecarProcess
from testing.prometheus import PrometheusProcess

DATA_PAGES = ("/metrics", "/stats", "/samples", "/requests", "/hints")
TOKEN, OTHER = "token-of-the-secret-0001", "token-of-the-secret-0002"


def write(folder: Path, token: str, name: str = "token") -> Path:
    """Write a token as the kubelet mounts it. Returns the directory."""
    (folder / "new").write_text(token)
    (folder / "new").rename(folder / name)
    return folder


def status_of(sidecar: SidecarProcess, path: str, token: str = "", host: str = "", name: str = "") -> int:
    """HTTP status for a client that is not on the sidecar's loopback address. ``name``: its header Host."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    headers |= {"Host": name} if name else {}
    url = f"http://{host or reachable_address()}:{sidecar.http_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_no_page_is_shown_to_a_web_page(tmp_path: Path) -> None:
    """The browser of a person with a port-forward sends the name of the web page, and needs no token."""
    pages = (*DATA_PAGES, "/healthz", "/readyz")
    with SidecarProcess(http_host="0.0.0.0", http_tokens_dir=tmp_path) as sidecar:
        local = {"host": "127.0.0.1"}
        assert [status_of(sidecar, path, **local) for path in pages] == [200] * 7
        assert [status_of(sidecar, path, **local, name="evil.example") for path in pages] == [421] * 7


def test_pages_are_shown_to_clients_with_the_token_only(tmp_path: Path) -> None:
    with SidecarProcess(http_host="0.0.0.0", http_tokens_dir=tmp_path / "tokens") as sidecar:
        assert status_of(sidecar, "/metrics", TOKEN) == 401  # the Secret is missing
        (tmp_path / "tokens").mkdir()
        write(tmp_path / "tokens", TOKEN)
        wait_until(lambda: status_of(sidecar, "/metrics", TOKEN) == 200)
        assert [status_of(sidecar, path, TOKEN) for path in DATA_PAGES] == [200] * 5
        assert [status_of(sidecar, path) for path in DATA_PAGES] == [401] * 5
        assert [status_of(sidecar, path) for path in ("/healthz", "/readyz")] == [200, 200]
        assert status_of(sidecar, "/metrics", OTHER) == 401
        assert status_of(sidecar, "/stats", host="127.0.0.1") == 200  # as through kubectl port-forward
        write(tmp_path / "tokens", OTHER)
        wait_until(lambda: status_of(sidecar, "/metrics", OTHER) == 200)
        assert status_of(sidecar, "/metrics", TOKEN) == 401
        (tmp_path / "tokens" / "token").unlink()
        wait_until(lambda: "each file must have one token" in sidecar.log)
        assert status_of(sidecar, "/metrics", OTHER) == 200
        assert TOKEN not in sidecar.log
        assert OTHER not in sidecar.log


@pytest.mark.kube
def test_prometheus_scrapes_with_a_token_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scrape-token"
    file.write_text(OTHER)
    tokens = tmp_path / "tokens"
    tokens.mkdir()
    with SidecarProcess(http_host="0.0.0.0", http_tokens_dir=write(tokens, TOKEN)) as sidecar:
        static = {"static_configs": [{"targets": [f"{reachable_address()}:{sidecar.http_port}"]}]}
        job = {"job_name": "sidecars", "authorization": {"credentials_file": str(file)}, **static}
        with PrometheusProcess([job]) as prometheus:
            wait_until(lambda: "401" in str([each["lastError"] for each in prometheus.targets()]))
            file.write_text(TOKEN)
            wait_until(lambda: prometheus.query("lmcache_memory_tier_size_bytes > 0"))


def use_account(plane: Cluster, account: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect with the rights of this ServiceAccount."""
    namespace, _, name = account.partition("/")
    config = plane.kubeconfig(account, token=plane.service_account_token(namespace, name))
    monkeypatch.setenv("KUBECONFIG", str(config))


@pytest.mark.kube
def test_operator_reads_only_sidecars_of_the_cluster_whose_token_it_sends(
    plane: Cluster, chart: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    namespace, _, name = chart.partition("/")
    use_account(plane, chart, monkeypatch)

    async def key() -> bytes:
        async with connect() as api:
            return await token_key(api, LeaseName(namespace, name))

    async def answers(sidecar: SidecarProcess, uid: str) -> list[Any]:
        async with StatsClient(sidecar.http_port, seconds=60, key=token_bytes) as stats:
            address = reachable_address()
            return [await stats.read(address, uid), await stats.samples(address, uid, {})]

    token_bytes = asyncio.run(key())
    assert len(token_bytes) == 43
    assert asyncio.run(key()) == token_bytes, "another operator, or the same after a restart"
    token = StatsClient(key=token_bytes).token("uid")
    with SidecarProcess(http_host="0.0.0.0", http_tokens_dir=write(tmp_path, token, "operator")) as sidecar:
        read = asyncio.run(answers(sidecar, "uid"))
        assert (read[0]["is_ready"], read[0]["http_authentication"]) == (True, "Token")
        assert read[1]
        assert asyncio.run(answers(sidecar, "other")) == [None, None]


@pytest.mark.kube
def test_operator_without_the_right_to_its_key_has_no_token(
    plane: Cluster, chart: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_account(plane, chart, monkeypatch)

    async def key() -> bytes:
        async with connect() as api:
            return await token_key(api, LeaseName(chart.partition("/")[0], "other"))

    assert asyncio.run(key()) == b""
    assert "no token opens pages" in caplog.text
