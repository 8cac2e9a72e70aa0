"""Changes of a spec that replace pods, which are those with another spec hash, and changes that keep them."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine, spec_hash
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from tests.harness.operator.model import NAME, UID, cluster
from tests.harness.operator.prefill import with_prefill

EXTERNAL = {"external": {"url": "redis://kv:6379"}}
MANAGED = {"managed": {"memoryPerShard": "1Gi"}}
REFERENCE = {"clusterRef": {"name": "kv"}}
USER_CERTIFICATE = {"tls": {"secretRef": {"name": f"{NAME}-remote-tls-{UID}"}}}
SALT = {"name": "search", "saltSecretRef": {"name": "search-salt"}}
HASHED = {"name": "batch", "saltHash": "a" * 64}


def engine(**fields: Any) -> dict[str, Any]:
    return {"engine": fields}


def blending(**fields: Any) -> dict[str, Any]:
    return engine(blend={"mode": "Request", **fields})


def sidecar(**fields: Any) -> dict[str, Any]:
    return {"sidecar": fields}


def tiers(**fields: Any) -> dict[str, Any]:
    return {"tiers": fields}


def encrypted(tier: dict[str, Any], secret: str = "a") -> dict[str, Any]:
    return tier | {"encryption": {"secretRef": {"name": secret}}}


def named(*entries: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"tenants": {"named": list(entries), **more}}


TWO = named(SALT, HASHED | {"memoryPercent": 50})
DISK = {"size": "1Ti"}
BLENDING = blending()
PREFILL = with_prefill()
UNSPLIT = PREFILL | engine(replicas=2)
CACHE_AWARE: dict[str, Any] = {"router": {"policy": "CacheAware"}}
BY_LOAD: dict[str, Any] = {"router": {"policy": "PowerOfTwo"}}
REPLACING = [
    ({}, engine(args=["--x"])),
    ({}, engine(image="other:1")),
    ({}, engine(gpu={"deviceClassName": "gpu.nvidia.com"})),
    ({}, engine(podTemplate={"metadata": {"labels": {"a": "b"}}})),
    ({}, engine(resources={"limits": {"memory": "64Gi"}})),
    ({}, engine(sharedMemorySize="8Gi")),
    ({}, engine(hintsRoute=True)),
    ({}, BLENDING),
    (BLENDING, blending(mode="Auto")),
    (BLENDING, blending(selection="First")),
    (BLENDING, blending(ratioPercent=20)),
    (BLENDING, blending(minTokens=512)),
    (BLENDING, blending(separator=" ###\n")),
    ({}, sidecar(image="other:1")),
    ({}, sidecar(chunkTokens=512)),
    ({}, sidecar(transfer="SharedMemory")),
    ({}, sidecar(httpAuthentication="Token")),
    ({}, tiers(remote=EXTERNAL)),
    ({}, tiers(disk=DISK)),
    ({}, tiers(admit="OnReuse")),
    ({}, tiers(memory={"size": "1Gi", "retainPercent": 0})),
    ({}, tiers(memory={"size": "1Gi", "maxTtlSeconds": 60})),
    ({}, tiers(peers={})),
    ({}, {"router": {}}),
    ({}, CACHE_AWARE),
    (tiers(disk=DISK), tiers(disk=DISK | {"storageClassName": "nvme"})),
    (tiers(disk=DISK), tiers(disk=encrypted(DISK))),
    *((tiers(remote=tier), tiers(remote=encrypted(tier))) for tier in (EXTERNAL, MANAGED, REFERENCE)),
    (tiers(remote=encrypted(EXTERNAL)), tiers(remote=encrypted(EXTERNAL, "b"))),
    (tiers(peers={}), tiers(peers={"bytesPerSecond": "1Gi"})),
    (tiers(peers={"bytesPerSecond": "1Gi"}), tiers(peers={"bytesPerSecond": "2Gi"})),
    (tiers(peers={}), tiers(peers={"clusterRef": {"name": "a"}})),
    (tiers(peers={"clusterRef": {"name": "a"}}), tiers(peers={"clusterRef": {"name": "b"}})),
    (TWO, named(HASHED)),
    (TWO, named(SALT, SALT | {"name": "new", "saltSecretRef": {"name": "new"}})),
    (TWO, named(SALT | {"saltSecretRef": {"name": "search-salt", "key": "other"}})),
    (named(), named(header=True)),
    (named(header=True), named(header=True) | BY_LOAD),
    (named(), {}),
]
KEEPING = [
    ({}, engine(replicas=7)),
    ({}, engine(image=IMAGES["engine"])),
    ({}, engine(gpu={"resourceName": "nvidia.com/gpu"})),
    ({}, engine(hintsRoute=False)),
    ({}, engine(resources={}, env=[], tolerations=[])),
    ({}, blending(mode="Off", selection="First", ratioPercent=20, minTokens=512)),
    (BLENDING, blending(ratioPercent=15)),
    ({}, sidecar(image=IMAGES["sidecar"])),
    ({}, sidecar(transfer="Auto")),
    ({}, sidecar(httpAuthentication="None")),
    ({}, tiers(memory={"size": "2Gi"})),
    ({}, tiers(memory={"size": "1Gi", "retainPercent": 25, "maxTtlSeconds": 3600})),
    ({}, tiers(admit="All")),
    ({}, BY_LOAD | {"clients": []}),
    (engine(kind="SGLang"), CACHE_AWARE | engine(kind="SGLang")),
    ({}, {"images": {"pullSecrets": []}}),
    ({}, {"images": {"policy": "Follow"}}),
    ({}, {"autoscaling": {"mode": "Auto", "memory": {"maxSize": "2Gi"}}}),
    ({"router": {}}, {"router": {"replicas": 5, "args": ["--max-payload-size=1"]}}),
    (tiers(disk=DISK), tiers(disk={"size": "2Ti"})),
    (tiers(remote=MANAGED), tiers(remote={"managed": MANAGED["managed"] | USER_CERTIFICATE})),
    (UNSPLIT, PREFILL),
    (PREFILL, with_prefill(args=["--a=1"], replicas=5)),
    (TWO, named(SALT | {"memoryPercent": 10, "priority": 9}, HASHED)),
    (TWO, named(SALT, HASHED, HASHED | {"name": "new", "saltHash": "b" * 64, "minMemoryPercent": 20})),
    (TWO, named(SALT | {"name": "renamed"})),
    (TWO, named(SALT | {"retainPercent": 0}, HASHED, default={"retainPercent": 100})),
    (TWO, TWO | named(SALT, default={"memoryPercent": 5, "lowerTierBytes": "1Gi"})),
    (named(), named(header=False) | BY_LOAD),
]


def hash_of(changes: dict[str, Any]) -> str:
    return spec_hash(parse(cluster(**changes)), IMAGES)


@pytest.mark.parametrize(("before", "after"), REPLACING)
def test_change_of_what_pods_have_replaces_them(before, after):
    assert hash_of(before) != hash_of(after)


@pytest.mark.parametrize(("before", "after"), KEEPING)
def test_other_change_keeps_pods(before, after):
    assert hash_of(before) == hash_of(after)
    if "size" not in str(after).lower():  # sizes change the template, and only new pods get them
        pods = [Engine().render(parse(cluster(**each)), Context(IMAGES))[-1] for each in (before, after)]
        assert pods[0]["spec"]["template"] == pods[1]["spec"]["template"], "it would never reach a pod"


def test_default_images_are_part_of_the_hash():
    assert spec_hash(parse(cluster()), IMAGES | {"sidecar": "sidecar:2"}) != hash_of({})
