"""Rendered objects of an engine: golden files, determinism, spec hash, and the contents of the pod."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmcache_operator.api.documents import dump
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.pods.resize import sidecar_memory
from lmcache_sidecar.config import read
from tests.harness.operator.model import Object, cluster
from tests.harness.operator.render import child_of, children, container, env_of, pod_of

GOLDEN = Path(__file__).parent / "golden"
AUTH = {"name": "redis-auth", "usernameKey": "user", "passwordKey": "pass"}
DEBUG = {"name": "engine", "env": [{"name": "VLLM_LOGGING_LEVEL", "value": "DEBUG"}]}
URL = "redis://redis.caches:6379/1"
SPREAD = {"maxSkew": 1, "topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "DoNotSchedule"}
FULL: dict[str, Any] = {
    "model": {
        "revision": "main", "tokenSecretRef": {"name": "hf", "key": "hub"},
        "volume": {"persistentVolumeClaim": {"claimName": "models"}},
    },
    "engine": {
        "image": "registry.example/vllm:1", "replicas": 3, "gpu": {"count": 4, "runtimeClassName": "nvidia"},
        "parallelism": {"tensor": 2, "pipeline": 2},
        "args": ["--max-model-len=32768", "--served-model-name", "llm"],
        "env": [{"name": "VLLM_NO_USAGE_STATS", "value": "1"}],
        "resources": {"requests": {"cpu": "8", "memory": "48Gi"}, "limits": {"memory": "64Gi"}},
        "sharedMemorySize": "32Gi", "nodeSelector": {"zone": "a"}, "priorityClassName": "serving",
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [SPREAD, SPREAD | {"labelSelector": {}}],
        "podTemplate": {
            "metadata": {"labels": {"team": "search"}},
            "spec": {"nodeSelector": {"gpu": "h200"}, "containers": [DEBUG]},
        },
    },
    "sidecar": {"image": "registry.example/sidecar:1", "chunkTokens": 512},
    "tiers": {
        "memory": {"size": "1Gi", "retainPercent": 40, "maxTtlSeconds": 86_400},
        "disk": {"size": "500Gi", "storageClassName": "local-nvme"},
        "remote": {"external": {"url": URL, "authSecretRef": AUTH}}, "admit": "OnReuse",
    },
}  # fmt: skip
ENCRYPTED_TIERS = {
    "disk": {"size": "500Gi", "encryption": {"secretRef": {"name": "disk-keys"}}},
    "remote": {"external": {"url": URL}, "encryption": {"secretRef": {"name": "kv-keys"}}},
}
NODES = {
    "replicas": 2, "nodes": 2, "topologyKey": "rack", "gpu": {"count": 8},
    "parallelism": {"tensor": 4, "data": 4, "expert": True},
}  # fmt: skip
PARTS = {"nodes": 2, "gpu": {"count": 8}, "parallelism": {"tensor": 8, "pipeline": 2}}
TENANTS = [
    {"name": "search", "saltSecretRef": {"name": "search-salt"}, "minMemoryPercent": 20},
    {"name": "batch", "saltHash": "0" * 64, "lowerTierBytes": "100Gi", "priority": -100, "retainPercent": 0},
    {"name": "chat", "saltSecretRef": {"name": "keys", "key": "chat"}},
]
DEFAULT = {"memoryPercent": 30, "retainPercent": 10}
BLEND = {"mode": "Request", "selection": "Deviation", "ratioPercent": 7, "separator": "$(A)$$\n"}
CASES = {
    "minimal": {},
    "full": FULL,
    "peers": {"engine": {"replicas": 2}, "tiers": {"peers": {"bytesPerSecond": "1Gi"}}},
    "nodes": {"engine": NODES},
    "parts": {"engine": PARTS, "router": {}, "tiers": {"peers": {}}},
    "sglang": {"engine": {"kind": "SGLang"}},
    "blend": {"engine": {"blend": BLEND}},
    "encrypted": {"tiers": ENCRYPTED_TIERS},
    "tenants": {"tenants": {"header": True, "default": DEFAULT, "named": TENANTS}},
}


def dumped(*components: Any, **changes: Any) -> str:
    return dump([*children(*components, **changes).values()])


@pytest.mark.parametrize("name", CASES)
def test_rendered_objects_equal_the_golden_file(name: str) -> None:
    """LMCACHE_UPDATE_GOLDEN=1 rewrites the files. Review the difference before you commit it."""
    path, text = GOLDEN / f"{name}.yaml", dumped(**CASES[name])
    if os.environ.get("LMCACHE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize(("mode", "setting"), [("Off", None), ("Request", "request"), ("Auto", "auto")])
def test_mode_of_blending_is_a_setting_of_the_connector(mode: str, setting: str | None) -> None:
    text = dumped(engine={"blend": {"mode": mode}})
    assert re.findall('"lmcache.blend":"(.*?)"', text) == ([setting] if setting else [])


def test_rendering_does_not_depend_on_the_hash_seed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster(**FULL), sort_keys=False))
    command = [sys.executable, "-m", "lmcache_operator", "render", "-f", str(file)]
    for seed in ("1", "2"):
        env = os.environ | {"PYTHONHASHSEED": seed}
        output = subprocess.run(command, env=env, capture_output=True, check=True).stdout
        assert output.decode() == dumped(Engine(), Injection(), **FULL)


@given(st.integers(2**26, 2**44))
def test_sidecar_memory_exceeds_the_tier_by_a_bounded_overhead(size: int) -> None:
    assert size + 2**29 <= sidecar_memory(size) < 1.04 * size + 2**30


def test_containers_meet_the_restricted_pod_security_standard() -> None:
    spec = pod_of(**FULL)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for each in spec["containers"] + spec["initContainers"]:
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("hostPath" not in volume for volume in spec["volumes"])


@pytest.mark.parametrize("name", CASES)
def test_only_engine_and_sidecar_mount_the_arena(name: str) -> None:
    spec = pod_of(**CASES[name])
    mounting = {
        each["name"]
        for each in spec["containers"] + spec["initContainers"]
        for mount in each.get("volumeMounts", ())
        if mount["mountPath"] in ("/run/lmcache", "/var/lib/lmcache")
    }
    assert mounting == {"engine", "sidecar"}
    assert [each["name"] for each in spec["containers"]] == ["engine"]


def test_sidecar_accepts_its_rendered_configuration(tmp_path: Path) -> None:
    file = tmp_path / "sidecar.yaml"
    file.write_text(child_of("ConfigMap", **FULL)["data"]["sidecar.yaml"])
    env = env_of(container(pod_of(**FULL), "sidecar"))
    reading = read({"config": str(file), "memory_size": "1073741824"}, env)
    loaded = reading.usable()
    assert (loaded.arena_path, loaded.http_port) == ("/var/lib/lmcache/arena", 9464)
    assert (loaded.memory_size, loaded.disk_path) == (2**30, "/var/lib/lmcache-disk")
    assert (loaded.admit, reading.warnings) == ("OnReuse", ())
    assert (loaded.memory_retain_percent, loaded.memory_max_ttl_seconds) == (40, 86_400)


def test_merge_keeps_ports_by_protocol_and_the_last_duplicate_variable() -> None:
    ports: list[Object] = [{"containerPort": 9000, "name": "tcp"}]
    ports.append({"containerPort": 9000, "name": "udp", "protocol": "UDP"})
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    template = {"spec": {"containers": [{"name": "engine", "ports": ports, "env": env}]}}
    (engine,) = pod_of(engine={"podTemplate": template})["containers"]
    assert [port["name"] for port in engine["ports"]] == ["http", "tcp", "udp"]
    assert env_of(engine)["A"] == "2"
