"""Rendered objects of an engine: golden files, determinism, spec hash, and the contents of the pod."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from lmcache_operator.api.crd import dump
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.pods.resize import sidecar_memory
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES

from tests.harness.operator_model import cluster

GOLDEN = Path(__file__).parent / "golden"
AUTH = {"name": "redis-auth", "usernameKey": "user", "passwordKey": "pass"}
FULL: dict[str, Any] = {
    "model": {
        "revision": "main",
        "tokenSecretRef": {"name": "hf", "key": "hub"},
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "engine": {
        "image": "registry.example/vllm:1",
        "replicas": 3,
        "gpu": {"count": 4, "runtimeClassName": "nvidia"},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "args": ["--max-model-len=32768", "--served-model-name", "llm"],
        "podTemplate": {
            "metadata": {"labels": {"team": "search"}},
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "containers": [{"name": "engine", "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}],
            },
        },
    },
    "sidecar": {"image": "registry.example/sidecar:1", "chunkTokens": 512},
    "tiers": {
        "disk": {"size": "500Gi", "storageClassName": "local-nvme"},
        "remote": {"external": {"url": "redis://redis.caches:6379/1", "authSecretRef": AUTH}},
        "admit": "OnReuse",
    },
}
CASES = {
    "minimal": {},
    "full": FULL,
    "peers": {"engine": {"replicas": 2}, "tiers": {"peers": {"bytesPerSecond": "1Gi"}}},
    "sglang": {"engine": {"kind": "SGLang"}},
    "encrypted": {
        "tiers": {
            "disk": {"size": "500Gi", "encryption": {"secretRef": {"name": "disk-keys"}}},
            "remote": {
                "external": {"url": "redis://redis.caches:6379/1"},
                "encryption": {"secretRef": {"name": "kv-keys"}},
            },
        }
    },
    "tenants": {
        "tenants": {
            "header": True,
            "default": {"memoryPercent": 30},
            "named": [
                {"name": "search", "saltSecretRef": {"name": "search-salt"}, "minMemoryPercent": 20},
                {"name": "batch", "saltHash": "0" * 64, "lowerTierBytes": "100Gi", "priority": -100},
            ],
        }
    },
}


def render(changes: dict[str, Any]) -> list[dict[str, Any]]:
    return Engine().render(parse(cluster(**changes)), Context(IMAGES))


def pod_of(changes: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = render(changes)[-1]["spec"]["template"]
    return template


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_equal_the_golden_file(name: str) -> None:
    """LMCACHE_UPDATE_GOLDEN=1 rewrites the files. Review the difference before you commit it."""
    path, text = GOLDEN / f"{name}.yaml", dump(render(CASES[name]))
    if os.environ.get("LMCACHE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


def test_rendering_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster(**FULL), sort_keys=False))
    command = [sys.executable, "-m", "lmcache_operator", "render", "-f", str(file)]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    injection_objects = Injection().render(parse(cluster(**FULL)), Context(IMAGES))
    assert outputs == {dump([*render(FULL), *injection_objects]).encode()}


def test_tenant_quota_is_rendered_only_in_the_sidecar_config() -> None:
    changes = {"tiers": {"memory": {"tenantQuotaPercent": 30}}}
    plain_objects, limited = (
        {o["kind"]: o for o in render(c) if o["kind"] != "Service"} for c in ({}, changes)
    )
    settings = yaml.safe_load(limited["ConfigMap"]["data"]["sidecar.yaml"])
    assert settings["tenant_quota_percent"] == 30
    assert "tenant_quota_percent" not in plain_objects["ConfigMap"]["data"]["sidecar.yaml"]
    pods = [by_kind["StatefulSet"]["spec"]["template"]["spec"] for by_kind in (plain_objects, limited)]
    assert pods[0] == pods[1]


def test_payload_can_be_an_image_volume() -> None:
    spec = pod_of({"sidecar": {"payload": "ImageVolume", "image": "sidecar:2"}})["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["sidecar"]
    assert {"name": "payload", "image": {"reference": "sidecar:2"}} in spec["volumes"]
    engine = spec["containers"][0]
    assert {"mountPath": "/opt/lmcache/client", "name": "payload"} in engine["volumeMounts"]
    # The whole image is mounted, because not every runtime can mount a part of an image.
    assert env_of(engine)["PYTHONPATH"] == "/opt/lmcache/client/opt/lmcache/payload"


@given(st.integers(2**26, 2**44))
def test_sidecar_memory_exceeds_the_tier_by_a_bounded_overhead(size: int) -> None:
    assert size + 2**29 <= sidecar_memory(size) < 1.04 * size + 2**30


def test_containers_meet_the_restricted_pod_security_standard() -> None:
    spec = pod_of(FULL)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_sidecar_accepts_its_rendered_configuration(tmp_path: Path) -> None:
    config = pytest.importorskip("lmcache_sidecar.config")
    file = tmp_path / "sidecar.yaml"
    file.write_text(next(o for o in render(FULL) if o["kind"] == "ConfigMap")["data"]["sidecar.yaml"])
    env = env_of(pod_of(FULL)["spec"]["initContainers"][0])
    reading = config.read({"config": str(file), "memory_size": "1073741824"}, env)
    loaded = reading.usable()
    assert (loaded.arena_path, loaded.http_port, loaded.memory_size) == (
        "/var/lib/lmcache/arena",
        9464,
        2**30,
    )
    assert (loaded.disk_path, loaded.admit, reading.warnings) == ("/var/lib/lmcache-disk", "OnReuse", ())


def test_merge_keeps_ports_by_protocol_and_the_last_duplicate_variable() -> None:
    ports = [
        {"containerPort": 9000, "name": "tcp"}, {"containerPort": 9000, "name": "udp", "protocol": "UDP"},
    ]  # fmt: skip
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    template = {"spec": {"containers": [{"name": "engine", "ports": ports, "env": env}]}}
    (engine,) = pod_of({"engine": {"podTemplate": template}})["spec"]["containers"]
    assert [port["name"] for port in engine["ports"]] == ["http", "tcp", "udp"]
    assert env_of(engine)["A"] == "2"
