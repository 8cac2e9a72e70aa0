"""Servers of a remote tier as pods of a real kubelet. The tests depend on their order."""

import base64
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.certificates import make_certificates
from testing.kube.api import Object
from testing.node.app import NAMESPACE, App
from testing.node.pods import Pod, is_ready

PROMPT = list(range(7, 7 + 256)) * 8
_NEW = (random.Random(seed).choices(range(4, 260), k=512) for seed in itertools.count())
"""Prompts that no test has used yet."""


@pytest.fixture(scope="module")
def app(make_app, references) -> Iterator[App]:
    managed = {
        "shards": 3,
        "memoryPerShard": "512Mi",
        "image": references["redis"],
        "resources": {"requests": {"cpu": "50m"}},
    }
    app = make_app("shards", remote={"managed": managed})
    app.apply()
    yield app
    app.delete()


def servers(app: App) -> list[Pod]:
    selector = f"lmcache.io/cluster={app.name},lmcache.io/component=remote"
    return [Pod(app.node, obj) for obj in app.node.api.objects("v1/pods", NAMESPACE, selector)]


def test_computed_rows_are_written_to_the_servers(app):
    pod = app.ready_pod()
    app.wait_condition("RemoteTierAvailable")
    assert all(is_ready(server.object) for server in servers(app))
    pod.complete(PROMPT)
    app.node.wait(lambda: pod.stats()["remote"]["written"] >= len(PROMPT) // 256, 120)
    assert app.wait_condition("RemoteTierReachable")["reason"] == "Reachable"


def test_new_pod_hits_in_the_remote_tier(app):
    before = app.ready_pod()
    app.node.api.delete("v1/pods", before.name, NAMESPACE)
    pod = app.ready_pod(instead_of=before)
    pod.complete(PROMPT)
    app.node.wait(lambda: pod.stats()["remote"]["hits"] > 0, 120)


def test_running_sidecar_switches_to_tls(app, tmp_path):
    before, secret = app.ready_pod(), app.secret_name("remote-tls")
    app.node.api.create("v1/secrets", {"metadata": {"name": secret}, **certificate(app, tmp_path)}, NAMESPACE)
    app.spec["spec"]["tiers"]["remote"]["managed"]["tls"] = {"secretRef": {"name": secret}}
    app.apply()
    live = f"{app.name}-remote"
    app.node.wait(lambda: secret in str(app.node.api.get("apps/v1/statefulsets", live, NAMESPACE)["spec"]))
    for server in servers(app):  # the operator would wait a quarter of an hour between them
        app.node.api.delete("v1/pods", server.name, NAMESPACE)

    def is_secure() -> bool:
        pods = servers(app)
        return len(pods) == 3 and all(server.is_ready and secret in str(server.object) for server in pods)

    app.node.wait(is_secure, 300)

    def is_written() -> bool:
        num_written = before.stats()["remote"]["written"]
        before.complete(next(_NEW))
        app.node.wait(lambda: before.stats()["num_unwritten_rows"] == 0, 120)
        return bool(before.stats()["remote"]["written"] > num_written)

    app.node.wait(is_written, 300)
    assert app.ready_pod().uid == before.uid


def test_password_and_certificate_are_rotated_without_a_restart(app, tmp_path):
    pod, name = app.ready_pod(), app.secret_name("remote")
    old = base64.b64decode(app.node.api.get("v1/secrets", name, NAMESPACE)["data"]["password"]).decode()

    def write(**passwords: str | None) -> None:
        app.node.api.patch("v1/secrets", name, {"stringData": passwords}, NAMESPACE)

    def answers(password: str) -> set[str]:
        flags = f"--tls --cacert /etc/lmcache/remote-tls/ca.crt --user lmcache --pass {password}"
        ask = ["sh", "-c", f"redis-cli {flags} ping 2>&1 || true"]
        return {server.exec("remote", *ask).strip().splitlines()[-1] for server in servers(app)}

    # The new certificate has another authority: until both sides have it, they refuse each other.
    renewed = certificate(app, tmp_path)
    authority = renewed["stringData"]["ca.crt"].strip()
    app.node.api.patch("v1/secrets", app.secret_name("remote-tls"), renewed, NAMESPACE)

    def is_renewed() -> bool:
        authorities = {
            server.exec("remote", "cat", "/etc/lmcache/remote-tls/ca.crt") for server in servers(app)
        }
        authorities.add(pod.exec("sidecar", "cat", "/etc/lmcache/remote-auth/ca.crt"))
        is_mounted = {text.strip() for text in authorities} == {authority}
        return is_mounted and all("NOAUTH" in answer for answer in answers("new"))

    app.node.wait(is_renewed, 300)
    app.node.wait(lambda: not pod.stats()["remote"]["off_reason"], 300)
    failures = pod.stats()["remote"]["failures"]
    write(other="new")
    app.node.wait(lambda: answers("new") == {"PONG"}, 300)
    write(password="new", other=old)
    mounted = "/etc/lmcache/remote-auth/password"
    app.node.wait(lambda: pod.exec("sidecar", "cat", mounted) == "new", 300)
    app.node.api.patch("v1/secrets", name, {"data": {"other": None}}, NAMESPACE)
    app.node.wait(lambda: "PONG" not in answers(old), 300)
    assert answers("new") == {"PONG"}
    pod.complete(PROMPT[1::-1] + PROMPT[2:514])
    app.node.wait(lambda: pod.stats()["num_unwritten_rows"] == 0, 120)
    assert pod.stats()["remote"]["failures"] == failures
    assert pod.stats()["remote"]["is_reachable"]
    assert [server.container("remote")["restartCount"] for server in servers(app)] == [0, 0, 0]


def certificate(app: App, folder: Path) -> Object:
    """Content of a Secret with a certificate for all servers, signed by a new authority."""
    certificates = make_certificates(folder, f"DNS:*.{app.name}-remote.{NAMESPACE}.svc")
    files = {"tls.crt": certificates.cert, "tls.key": certificates.key, "ca.crt": certificates.ca}
    return {"stringData": {name: path.read_text() for name, path in files.items()}}
