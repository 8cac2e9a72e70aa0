"""Tokens for a sidecar's pages, reviewed by a real API server."""

import asyncio
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from lmcache_operator.stats import StatsClient
from lmcache_sidecar.token_reviews import AUDIENCE, Durations, TokenReviews

from testing.child_process import reachable_address
from testing.kube.api import Api, ApiError
from testing.kube.cluster import Cluster
from testing.kube.operator import SERVICE_ACCOUNT, SYSTEM_NAMESPACE
from testing.processes import SidecarProcess
from testing.prometheus import PrometheusProcess
from tests.harness.kube import new_namespace

pytestmark = pytest.mark.kube

BINDINGS = "rbac.authorization.k8s.io/v1/clusterrolebindings"
DELEGATOR = "system:auth-delegator"
READER = f"{SERVICE_ACCOUNT}-metrics-reader"
DATA_PAGES = ("/metrics", "/stats", "/samples", "/requests")


class Place(NamedTuple):
    """A namespace with ServiceAccounts, and the files of the sidecar's pod."""

    plane: Cluster
    namespace: str
    files: Path

    @property
    def environ(self) -> dict[str, str]:
        """Variables that each pod has."""
        url = urlsplit(self.plane.url)
        return {
            "KUBERNETES_SERVICE_HOST": str(url.hostname),
            "KUBERNETES_SERVICE_PORT": str(url.port),
        }

    def token(self, account: str, audience: str = AUDIENCE) -> str:
        return self.plane.service_account_token(self.namespace, account, audience=audience)

    def bind(self, role: str, account: str) -> None:
        name = f"{self.namespace}-{account}"
        reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
        subject = {"kind": "ServiceAccount", "name": account, "namespace": self.namespace}
        body = {"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]}
        self.plane.api.create(BINDINGS, body)

    def mount(self, account: str) -> None:
        """Write the files that a pod with this ServiceAccount has."""
        (self.files / "token").write_text(self.token(account, ""))
        (self.files / "ca.crt").write_bytes(self.plane.ca.read_bytes())


@pytest.fixture(scope="module")
def place(plane: Cluster, chart: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    roles = {"reader": READER, "leaver": READER, "sidecar": DELEGATOR}
    with new_namespace(plane, "pages") as namespace:
        made = Place(plane, namespace, tmp_path_factory.mktemp("sidecar"))
        for account in (*roles, "poor", "unbound"):
            plane.api.create("v1/serviceaccounts", {"metadata": {"name": account}}, namespace)
        for account, role in roles.items():
            made.bind(role, account)
        made.mount("sidecar")
        yield made
        for account in (*roles, "unbound"):
            plane.api.delete(BINDINGS, f"{namespace}-{account}")


def sidecar_of(place: Place) -> SidecarProcess:
    options = {"http_host": "0.0.0.0", "http_authentication": "TokenReview"}
    sidecar = SidecarProcess(**options, http_authentication_dir=place.files)
    sidecar.environment |= place.environ
    return sidecar


def status_of(sidecar: SidecarProcess, path: str, token: str = "", host: str = "") -> int:
    """HTTP status for a client that is not on the sidecar's loopback address."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    url = f"http://{host or reachable_address()}:{sidecar.http_port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_pages_are_shown_to_accounts_with_the_right_only(place: Place, tmp_path: Path) -> None:
    unbound = place._replace(files=tmp_path)
    unbound.mount("unbound")
    with sidecar_of(unbound) as sidecar:
        good = place.token("reader")
        assert status_of(sidecar, "/metrics", good) == 503  # the sidecar may not create reviews yet
        assert "bind the ClusterRole system:auth-delegator" in sidecar.log
        place.bind(DELEGATOR, "unbound")
        # The API server learns of the binding soon, and no failure is cached.
        place.plane.wait(lambda: status_of(sidecar, "/metrics", good) == 200)
        assert [status_of(sidecar, path) for path in DATA_PAGES] == [401] * 4
        assert [status_of(sidecar, path) for path in ("/healthz", "/readyz")] == [200, 200]
        assert status_of(sidecar, "/metrics", place.token("reader", "")) == 401  # for the API server
        assert status_of(sidecar, "/metrics", place.token("reader", "other.example")) == 401
        assert status_of(sidecar, "/metrics", good[:-4] + "AAAA") == 401
        assert status_of(sidecar, "/metrics", place.token("poor")) == 403
        assert status_of(sidecar, "/stats", good) == 403
        assert status_of(sidecar, "/stats", host="127.0.0.1") == 200  # as through kubectl port-forward
        assert good not in sidecar.log


def test_prometheus_scrapes_with_a_token_in_a_file(place: Place, tmp_path: Path) -> None:
    file = tmp_path / "scrape-token"
    file.write_text(place.token("poor"))
    with sidecar_of(place) as sidecar:
        static = {"static_configs": [{"targets": [f"{reachable_address()}:{sidecar.http_port}"]}]}
        jobs = [
            {"job_name": "with-token", "authorization": {"credentials_file": str(file)}, **static},
            {"job_name": "without", **static},
        ]
        with PrometheusProcess(jobs) as prometheus:

            def errors() -> dict[str, str]:
                return {target["labels"]["job"]: target["lastError"] for target in prometheus.targets()}

            place.plane.wait(lambda: "403 Forbidden" in errors().get("with-token", ""))
            file.write_text(place.token("reader"))  # the kubelet renews tokens in the same way
            place.plane.wait(lambda: prometheus.query('lmcache_memory_tier_size_bytes{job="with-token"} > 0'))
            place.plane.wait(lambda: "401 Unauthorized" in errors().get("without", ""))
            assert prometheus.query('lmcache_memory_tier_size_bytes{job="without"}') == []


def test_operator_reads_its_pages_with_a_token_that_is_useless_elsewhere(
    place: Place, tmp_path: Path
) -> None:
    file = tmp_path / "operator-token"
    account = SYSTEM_NAMESPACE, SERVICE_ACCOUNT

    async def answers(sidecar: SidecarProcess) -> list[Any]:
        async with StatsClient(sidecar.http_port, seconds=60, token=file) as stats:
            address = reachable_address()
            return [await stats.read(address), await stats.samples(address, {})]

    with sidecar_of(place) as sidecar:
        assert asyncio.run(answers(sidecar)) == [None, None]
        token = place.plane.service_account_token(*account, audience=AUDIENCE)
        file.write_text(token)
        place.plane.wait(lambda: all(asyncio.run(answers(sidecar))))
        read = asyncio.run(answers(sidecar))
        assert (read[0]["is_ready"], read[0]["http_authentication"]) == (True, "TokenReview")
        assert status_of(sidecar, "/metrics", token) == 403
        assert status_of(sidecar, "/requests", token) == 403
    with pytest.raises(ApiError) as refused:
        Api(place.plane.url, place.plane.ca, token).request("GET", "/api/v1/namespaces")
    assert refused.value.code == 401


def test_deleted_account_is_refused_when_the_result_expires(place: Place) -> None:
    token = place.token("leaver")

    def result(reviews: TokenReviews) -> int:
        page = asyncio.run(reviews.refusal("/metrics", token))
        return page.status if page else 200

    def ask(timing: Durations) -> int:
        reviews = TokenReviews(str(place.files), place.environ, timing)
        try:
            return result(reviews)
        finally:
            reviews.close()

    at_once = Durations(review=60, allowed=0, refused=0)
    place.plane.wait(lambda: ask(at_once) == 200)
    cached = TokenReviews(str(place.files), place.environ, Durations(60, 3600, 3600))
    assert result(cached) == 200
    place.plane.api.delete("v1/serviceaccounts", "leaver", place.namespace)
    place.plane.wait(lambda: ask(at_once) == 401)  # the API server itself caches tokens for ten seconds
    assert result(cached) == 200
    cached.close()


def test_stopped_api_server_shows_no_page_and_stops_no_engine(place: Place) -> None:
    unstarted = sidecar_of(place)
    unstarted.environment["KUBERNETES_SERVICE_PORT"] = "1"  # nothing listens there
    with unstarted as sidecar:
        assert status_of(sidecar, "/metrics", place.token("reader")) == 503
        assert status_of(sidecar, "/readyz") == 200
        assert status_of(sidecar, "/stats", host="127.0.0.1") == 200
        assert "can't review tokens" in sidecar.log
