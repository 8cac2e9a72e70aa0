"""Rendered objects of an engine: golden files, determinism, spec hash, and the contents of the pod."""

from __future__ import annotations

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
from lmcache_operator.components.engine.engine import Engine, spec_hash
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.pods.resize import sidecar_memory
from lmcache_operator.specs.kinds import ref_of
from lmcache_operator.specs.names import OPERATOR_LABELS
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


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_engine_lists_the_refs_of_all_rendered_objects(changes: dict[str, Any]) -> None:
    wanted = [ref for ref in Engine().refs("demo") if ref.kind != "ResourceClaimTemplate"]
    assert sorted(map(ref_of, render(changes))) == sorted(wanted)


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


@pytest.mark.parametrize(
    ("changes", "replaces"),
    [
        ({"engine": {"replicas": 7}}, False),
        ({"tiers": {"memory": {"size": "2Gi"}}}, False),
        ({"engine": {"args": ["--x"]}}, True),
        ({"engine": {"image": "other:1"}}, True),
        ({"engine": {"image": IMAGES["engine"]}}, False),
        ({"sidecar": {"image": IMAGES["sidecar"]}}, False),
        ({"sidecar": {"image": "other:1"}}, True),
        ({"sidecar": {"chunkTokens": 512}}, True),
        ({"sidecar": {"transfer": "Auto"}}, False),
        ({"sidecar": {"payload": "InitContainer"}}, False),
        ({"sidecar": {"payload": "ImageVolume"}}, True),
        ({"sidecar": {"transfer": "SharedMemory"}}, True),
        ({"engine": {"gpu": {"resourceName": "nvidia.com/gpu"}}}, False),
        ({"engine": {"gpu": {"deviceClassName": "gpu.nvidia.com"}}}, True),
        ({"tiers": {"remote": {"external": {"url": "redis://h"}}}}, True),
        ({"engine": {"podTemplate": {"metadata": {"labels": {"a": "b"}}}}}, True),
        ({"tiers": {"disk": {"size": "1Ti"}}}, True),
        ({"engine": {"resources": {}, "env": [], "tolerations": []}}, False),
        ({"engine": {"resources": {"limits": {"memory": "64Gi"}}}}, True),
        ({"engine": {"sharedMemorySize": "8Gi"}}, True),
        ({"tiers": {"memory": {"tenantQuotaPercent": 30}}}, True),
        ({"tiers": {"memory": {"tenantQuotaPercent": 100}}}, False),
        ({"tiers": {"admit": "All"}}, False),
        ({"tiers": {"admit": "OnReuse"}}, True),
    ],
)
def test_spec_hash_changes_only_with_fields_of_the_pod(changes: dict[str, Any], replaces: bool) -> None:
    before, after = (spec_hash(parse(cluster(**c)), IMAGES) for c in ({}, changes))
    assert (before != after) is replaces


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


def test_changed_default_image_changes_the_spec_hash() -> None:
    resource = parse(cluster())
    assert spec_hash(resource, IMAGES) != spec_hash(resource, IMAGES | {"sidecar": "sidecar:2"})


def test_disk_class_changes_the_spec_hash_and_disk_size_does_not() -> None:
    def hash_of(**disk: str) -> str:
        return spec_hash(parse(cluster(tiers={"disk": disk})), IMAGES)

    assert hash_of(size="1Ti") == hash_of(size="2Ti")
    assert hash_of(size="1Ti") != hash_of(size="1Ti", storageClassName="nvme")


def test_sidecar_starts_first_and_has_no_startup_gate() -> None:
    sidecar, payload = pod_of({})["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"], payload["name"]) == ("sidecar", "Always", "payload")
    assert not {"startupProbe", "readinessProbe"} & sidecar.keys()
    assert payload["image"] == sidecar["image"]


def test_payload_can_be_an_image_volume() -> None:
    spec = pod_of({"sidecar": {"payload": "ImageVolume", "image": "sidecar:2"}})["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["sidecar"]
    assert {"name": "payload", "image": {"reference": "sidecar:2"}} in spec["volumes"]
    engine = spec["containers"][0]
    assert {"mountPath": "/opt/lmcache/client", "name": "payload"} in engine["volumeMounts"]
    # The whole image is mounted, because not every runtime can mount a part of an image.
    assert env_of(engine)["PYTHONPATH"] == "/opt/lmcache/client/opt/lmcache/payload"


def test_sidecar_memory_limit_covers_the_arena() -> None:
    template = pod_of({"tiers": {"memory": {"size": "64Gi"}}})
    sidecar = template["spec"]["initContainers"][0]
    arena = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "arena")
    assert "--memory-size=68719476736" in sidecar["args"]
    # The limit is the maximum size of the arena, a sparse file, while the pod runs.
    assert arena["emptyDir"] == {"medium": "Memory", "sizeLimit": "262144Mi"}
    assert sidecar["resources"]["limits"]["memory"] == sidecar["resources"]["requests"]["memory"] == "68096Mi"


def test_disk_tier_fits_its_volume() -> None:
    spec = pod_of({"tiers": {"disk": {"size": "500Gi", "storageClassName": "local-nvme"}}})["spec"]
    (disk,) = [volume for volume in spec["volumes"] if volume["name"] == "disk"]
    assert disk["ephemeral"]["volumeClaimTemplate"]["spec"] == {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "512000Mi"}},
        "storageClassName": "local-nvme",
    }
    sidecar, env = spec["initContainers"][0], env_of(spec["initContainers"][0])
    assert {"mountPath": env["LMCACHE_DISK_PATH"], "name": "disk"} in sidecar["volumeMounts"]
    assert "disk" not in {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
    # ext4 reserves 1.8 % of a volume of this size, and the sidecar refuses a tier above 90 % of the rest.
    assert int(env["LMCACHE_DISK_SIZE"]) == 500 * 2**30 * 85 // 100
    assert not [item for item in env_of(pod_of({})["spec"]["initContainers"][0]) if "DISK" in item]


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


def test_secret_keys_are_mounted_under_fixed_names() -> None:
    objects = render(FULL)
    volumes = {volume["name"]: volume for volume in objects[-1]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["remote-auth"]["secret"] == {
        "secretName": "redis-auth",
        "items": [{"key": "pass", "path": "password"}, {"key": "user", "path": "username"}],
    }
    config = yaml.safe_load(next(o for o in objects if o["kind"] == "ConfigMap")["data"]["sidecar.yaml"])
    assert config["remote_password_file"] == "/etc/lmcache/remote-auth/password"
    assert config["remote_url"] == "redis://redis.caches:6379/1"


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


def test_sidecar_sees_no_gpu_by_default() -> None:
    """This also holds if its image or the container runtime would expose all GPUs."""
    sidecar = pod_of({})["spec"]["initContainers"][0]
    assert env_of(sidecar)["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert sidecar["resources"].keys() == {"limits", "requests"}
    assert sidecar["resources"]["limits"].keys() == {"memory"}


@pytest.mark.parametrize(
    ("engine", "cpu", "memory"),
    [
        ({}, "1", "4Gi"),
        ({"gpu": {"count": 0}}, "1", "4Gi"),
        ({"gpu": {"count": 8}, "parallelism": {"tensor": 8}}, "8", "32Gi"),
    ],
)
def test_engine_has_requests_and_shared_memory(engine: dict[str, Any], cpu: str, memory: str) -> None:
    spec = pod_of({"engine": engine})["spec"]
    assert spec["containers"][0]["resources"]["requests"] == {"cpu": cpu, "memory": memory}
    assert {"mountPath": "/dev/shm", "name": "shm"} in spec["containers"][0]["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert spec["initContainers"][0]["resources"]["requests"]["cpu"] == "100m"


def test_sidecar_command_line_has_only_flags_of_earlier_versions() -> None:
    """A newer operator's template may create a pod with an older sidecar.

    A sidecar ignores unknown keys of its file, but no unknown flags.
    """
    flags = [arg.partition("=")[0] for arg in pod_of(FULL)["spec"]["initContainers"][0]["args"]]
    assert flags == ["serve", "--config", "--memory-size"]


def test_network_policy_lets_the_operator_poll_sidecars() -> None:
    def sources(*operator_namespace: str) -> list[Any]:
        rendered = Engine().render(parse(cluster()), Context(IMAGES, *operator_namespace))
        policy = next(o for o in rendered if o["kind"] == "NetworkPolicy")
        (rule_with_sources,) = [rule for rule in policy["spec"]["ingress"] if "from" in rule]
        return rule_with_sources["from"]

    (operator_source,) = [source for source in sources("lmcache-system") if source not in sources()]
    assert operator_source["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "lmcache-system"
    }
    assert operator_source["podSelector"]["matchLabels"] == OPERATOR_LABELS


def test_merge_keeps_ports_by_protocol_and_the_last_duplicate_variable() -> None:
    ports = [
        {"containerPort": 9000, "name": "tcp"}, {"containerPort": 9000, "name": "udp", "protocol": "UDP"},
    ]  # fmt: skip
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    template = {"spec": {"containers": [{"name": "engine", "ports": ports, "env": env}]}}
    (engine,) = pod_of({"engine": {"podTemplate": template}})["spec"]["containers"]
    assert [port["name"] for port in engine["ports"]] == ["http", "tcp", "udp"]
    assert env_of(engine)["A"] == "2"
