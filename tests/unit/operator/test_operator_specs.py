"""What is rendered: as checked in, the same in every process, and with what the cache needs."""

from __future__ import annotations

import copy
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
from lmcache_operator.components.engine.pod import sidecar_memory
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.specs.kinds import ref_of
from lmcache_operator.specs.merge import first_difference, merge
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
CASES = {"minimal": {}, "full": FULL}


def render(changes: dict[str, Any]) -> list[dict[str, Any]]:
    return Engine().render(parse(cluster(**changes)), Context(IMAGES))


def pod_of(changes: dict[str, Any]) -> dict[str, Any]:
    template: dict[str, Any] = render(changes)[-1]["spec"]["template"]
    return template


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


@pytest.mark.parametrize("name", CASES)
def test_rendering_is_as_checked_in(name: str) -> None:
    """LMCACHE_UPDATE_GOLDEN=1 writes the files anew; look at the difference before committing it."""
    path, text = GOLDEN / f"{name}.yaml", dump(render(CASES[name]))
    if os.environ.get("LMCACHE_UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.read_text() == text


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_what_is_rendered_is_what_is_looked_for(changes: dict[str, Any]) -> None:
    wanted = [ref for ref in Engine().refs("demo") if ref.kind != "ResourceClaimTemplate"]
    assert sorted(map(ref_of, render(changes))) == sorted(wanted)


def test_rendering_is_the_same_in_a_process_with_another_hash_seed(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster(**FULL), sort_keys=False))
    command = [sys.executable, "-m", "lmcache_operator", "render", "-f", str(file)]
    outputs = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    added = Injection().render(parse(cluster(**FULL)), Context(IMAGES))
    assert outputs == {dump([*render(FULL), *added]).encode()}


# -- spec hash: what makes the operator replace pods


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
def test_only_a_declaration_for_the_pod_replaces_pods(changes: dict[str, Any], replaces: bool) -> None:
    before, after = (spec_hash(parse(cluster(**c)), IMAGES) for c in ({}, changes))
    assert (before != after) is replaces


def test_a_tenants_quota_reaches_the_sidecar_by_its_configuration_alone() -> None:
    changes = {"tiers": {"memory": {"tenantQuotaPercent": 30}}}
    plain, limited = ({o["kind"]: o for o in render(c) if o["kind"] != "Service"} for c in ({}, changes))
    settings = yaml.safe_load(limited["ConfigMap"]["data"]["sidecar.yaml"])
    assert settings["tenant_quota_percent"] == 30
    assert "tenant_quota_percent" not in plain["ConfigMap"]["data"]["sidecar.yaml"]
    pods = [found["StatefulSet"]["spec"]["template"]["spec"] for found in (plain, limited)]
    assert pods[0] == pods[1]


def test_another_default_image_replaces_pods() -> None:
    plain = parse(cluster())
    assert spec_hash(plain, IMAGES) != spec_hash(plain, IMAGES | {"sidecar": "sidecar:2"})


def test_another_size_of_the_disk_replaces_no_pods_another_class_does() -> None:
    def hash_of(**disk: str) -> str:
        return spec_hash(parse(cluster(tiers={"disk": disk})), IMAGES)

    assert hash_of(size="1Ti") == hash_of(size="2Ti")
    assert hash_of(size="1Ti") != hash_of(size="1Ti", storageClassName="nvme")


# -- the pod


def test_the_sidecar_comes_first_and_gates_nothing() -> None:
    sidecar, payload = pod_of({})["spec"]["initContainers"]
    assert (sidecar["name"], sidecar["restartPolicy"], payload["name"]) == ("sidecar", "Always", "payload")
    assert not {"startupProbe", "readinessProbe"} & sidecar.keys()
    assert payload["image"] == sidecar["image"]


def test_the_payload_can_be_a_mounted_image() -> None:
    spec = pod_of({"sidecar": {"payload": "ImageVolume", "image": "sidecar:2"}})["spec"]
    assert [container["name"] for container in spec["initContainers"]] == ["sidecar"]
    assert {"name": "payload", "image": {"reference": "sidecar:2"}} in spec["volumes"]
    engine = spec["containers"][0]
    assert {"mountPath": "/opt/lmcache/client", "name": "payload"} in engine["volumeMounts"]
    # The whole image is mounted: not every runtime can mount a part of one.
    assert env_of(engine)["PYTHONPATH"] == "/opt/lmcache/client/opt/lmcache/payload"


def test_memory_of_the_sidecar_holds_its_arena_and_more() -> None:
    template = pod_of({"tiers": {"memory": {"size": "64Gi"}}})
    sidecar = template["spec"]["initContainers"][0]
    arena = next(volume for volume in template["spec"]["volumes"] if volume["name"] == "arena")
    assert "--memory-size=68719476736" in sidecar["args"]
    # What it may grow to while it runs: a file with holes.
    assert arena["emptyDir"] == {"medium": "Memory", "sizeLimit": "262144Mi"}
    assert sidecar["resources"]["limits"]["memory"] == sidecar["resources"]["requests"]["memory"] == "68096Mi"


def test_the_disk_tier_fits_its_volume() -> None:
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
    # ext4 keeps 1.8 % of so large a volume, and the tier is refused above nine tenths of what is left.
    assert int(env["LMCACHE_DISK_SIZE"]) == 500 * 2**30 * 85 // 100
    assert not [item for item in env_of(pod_of({})["spec"]["initContainers"][0]) if "DISK" in item]


@given(st.integers(2**26, 2**44))
def test_the_sidecar_is_never_smaller_than_what_it_holds(size: int) -> None:
    assert size + 2**29 <= sidecar_memory(size) < 1.04 * size + 2**30


def test_every_container_meets_the_restricted_pod_security_standard() -> None:
    spec = pod_of(FULL)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"] + spec["initContainers"]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert all("hostPath" not in volume for volume in spec["volumes"])


def test_secrets_are_mounted_under_our_names_whatever_their_keys_are_called() -> None:
    objects = render(FULL)
    volumes = {volume["name"]: volume for volume in objects[-1]["spec"]["template"]["spec"]["volumes"]}
    assert volumes["remote-auth"]["secret"] == {
        "secretName": "redis-auth",
        "items": [{"key": "pass", "path": "password"}, {"key": "user", "path": "username"}],
    }
    config = yaml.safe_load(next(o for o in objects if o["kind"] == "ConfigMap")["data"]["sidecar.yaml"])
    assert config["remote_password_file"] == "/etc/lmcache/remote-auth/password"
    assert config["remote_url"] == "redis://redis.caches:6379/1"


def test_the_sidecar_accepts_its_configuration(tmp_path: Path) -> None:
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


def test_the_sidecar_sees_no_gpu() -> None:
    """Also where its image, or the container runtime, would show it all of them."""
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
def test_the_engine_has_requests_and_shared_memory(engine: dict[str, Any], cpu: str, memory: str) -> None:
    spec = pod_of({"engine": engine})["spec"]
    assert spec["containers"][0]["resources"]["requests"] == {"cpu": cpu, "memory": memory}
    assert {"mountPath": "/dev/shm", "name": "shm"} in spec["containers"][0]["volumeMounts"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}} in spec["volumes"]
    assert spec["initContainers"][0]["resources"]["requests"]["cpu"] == "100m"


def test_the_sidecars_command_line_never_grows() -> None:
    """A pod with an older sidecar may be made from a newer operator's template: unlike keys of the file, no
    flag is ignored where it is not known."""
    flags = [arg.partition("=")[0] for arg in pod_of(FULL)["spec"]["initContainers"][0]["args"]]
    assert flags == ["serve", "--config", "--memory-size"]


# -- merge and containment

names = st.sampled_from(["a", "b", "c"])
leaves = st.none() | st.booleans() | st.integers(0, 3) | st.text("xy", max_size=2)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
    max_leaves=12,
)
objects = st.dictionaries(names, values, max_size=3)


@given(objects)
def test_everything_contains_itself(value: dict[str, Any]) -> None:
    assert first_difference(value, copy.deepcopy(value)) is None


@given(objects, st.dictionaries(st.sampled_from(["x", "y"]), values, max_size=2))
def test_fields_of_others_do_not_matter(ours: dict[str, Any], others: dict[str, Any]) -> None:
    assert first_difference(ours, {**others, **ours}) is None


@given(objects, objects)
def test_merging_changes_neither_side(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    copies = copy.deepcopy((base, overlay))
    merge(base, overlay)
    assert (base, overlay) == copies


@pytest.mark.parametrize(
    ("wanted", "live", "where"),
    [
        ({"a": 1}, {"a": 2}, "a"),
        ({"a": {"b": 1}}, {}, "a"),
        ({"a": {}}, {}, None),
        ({"a": []}, {}, None),
        ({"a": [1, 2]}, {"a": [2, 1]}, "a[0]"),
        ({"a": [1]}, {"a": [1, 2]}, "a"),
        ({"e": [{"name": "x", "v": 1}]}, {"e": [{"name": "y"}, {"name": "x", "v": 1}]}, None),
        ({"e": [{"name": "x", "v": 1}]}, {"e": [{"name": "x", "v": 2}]}, "e[x].v"),
        ({"e": [{"name": "x"}]}, {"e": [{"name": "y"}]}, "e[x]"),
        ({"ports": [{"port": 1}]}, {"ports": [{"port": 1}, {"port": 2}]}, "ports"),
        ({"selector": {"a": "b"}}, {"selector": {"a": "b", "c": "d"}}, None),
        ({"r": {"limits": {"memory": "1024Mi"}}}, {"r": {"limits": {"memory": "1Gi"}}}, None),
        ({"data": {"memory": "1024Mi"}}, {"data": {"memory": "1Gi"}}, "data.memory"),
    ],
)
def test_the_first_difference_is_named(wanted: Any, live: Any, where: str | None) -> None:
    assert first_difference(wanted, live) == where


def test_the_operator_may_ask_the_sidecars() -> None:
    def sources(*where: str) -> list[Any]:
        rendered = Engine().render(parse(cluster()), Context(IMAGES, *where))
        policy = next(o for o in rendered if o["kind"] == "NetworkPolicy")
        (own,) = [rule for rule in policy["spec"]["ingress"] if "from" in rule]
        return own["from"]

    (more,) = [source for source in sources("lmcache-system") if source not in sources()]
    assert more["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "lmcache-system"}
    assert more["podSelector"]["matchLabels"] == OPERATOR_LABELS


def test_two_ports_of_one_number_are_both_kept_and_the_last_of_two_variables() -> None:
    ports = [
        {"containerPort": 9000, "name": "tcp"}, {"containerPort": 9000, "name": "udp", "protocol": "UDP"},
    ]  # fmt: skip
    env = [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]
    template = {"spec": {"containers": [{"name": "engine", "ports": ports, "env": env}]}}
    (engine,) = pod_of({"engine": {"podTemplate": template}})["spec"]["containers"]
    assert [port["name"] for port in engine["ports"]] == ["http", "tcp", "udp"]
    assert env_of(engine)["A"] == "2"
