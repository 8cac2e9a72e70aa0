"""Random LMCacheClusters that fit the definition's schema, some of them with one broken value.

Unit tests reconcile many of them against a model, and an integration test a few on a real API server. A seed
determines a walk through the schema as the API server has it. Hypothesis would need seconds for a pod.
"""

import random
import string
from collections.abc import Iterator
from typing import Any

from lmcache_operator.api.crd import crd
from tests.harness import scope
from tools.kube import schemas

Object = dict[str, Any]
_SCHEMA: Object = crd(schemas.definitions())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC_SCHEMA: Object = _SCHEMA["properties"]["spec"]
"""Schema of ``spec``, with the types of Kubernetes."""
STATUS_SCHEMA: Object = _SCHEMA["properties"]["status"]
"""Schema of ``status``."""
_MAX_LEVELS = 12
_WORDS = ("a", "engine", "sidecar", "payload", "arena", "/models", "10m", "1Gi", "x-y", "Always", "0.5")
_EXAMPLES = {
    "size": ("1Gi", "0.5Ti", "1073741824"),
    "memoryPerShard": ("512Mi", "1Gi"),
    "bytesPerSecond": ("1Gi", "100M"),
    "lowerTierBytes": ("1", "1Gi", "1.5Gi"),
    "resourceName": ("nvidia.com/gpu", "amd.com/gpu"),
    "url": ("redis://h:1", "rediss://h:1,i:2/3?verify=ca", "redis-cluster://h:7000"),
    "gpuHour": ("2.50", "0"),
    "memoryGiBHour": ("0.004", "0", "1234567.12345678"),
    "shardGiBHour": ("0.004", "0"),
    "image": ("engine:2", "registry.example/team/vllm@sha256:" + "0" * 64),
}
_ODD = (
    None, "", " ", "\x00", "ü" * 300, "-1",
    0, -1, 2**63, 1.5, True, [], [None], {}, {"": {}}, {"a": [{"name": "a"}, {"name": "a"}]}, "a" * 5000,
)  # fmt: skip


def seeds(number: int) -> range:
    """Return a third of ``number`` seeds, or ten times as many. The commit chooses the first one."""
    first = scope.seed() % 1_000_000
    return range(first, first + scope.examples(number))


def spec(seed: int) -> tuple[Object, bool]:
    """A spec, and whether one of its values was broken."""
    return spec_by(random.Random(seed))


def spec_by(rng: random.Random) -> tuple[Object, bool]:
    """A spec as ``spec`` makes it, with other random numbers."""
    generated: Object = _value(SPEC_SCHEMA, "spec", rng, 0)
    if rng.random() < 0.3:  # few random specs choose a kind
        generated.setdefault("engine", {})["kind"] = "SGLang"
    _obey_rules(generated)
    if is_broken := rng.random() < 0.4:
        _break(generated, rng)
    return generated, is_broken


def any_value(schema: Object, name: str, rng: random.Random) -> Any:
    """A value that fits the schema, with only the required fields. ``name``: the field that has it."""
    return _value(schema, name, rng, _MAX_LEVELS + 1 if name not in _EXAMPLES else 0)


def value_of(schema: Object, name: str, rng: random.Random) -> Any:
    """A value that fits the schema, with some of its other fields."""
    return _value(schema, name, rng, 0)


def spec_of_init_container(seed: int) -> Object:
    """A spec that changes two fields of one of the operator's init containers. Few random specs do that."""
    rng = random.Random(seed)
    schema = SPEC_SCHEMA
    for key in ("engine", "podTemplate", "spec", "initContainers"):
        schema = schema["properties"][key]
    fields = schema["items"]["properties"]
    values = {key: _value(fields[key], key, rng, 5) for key in rng.sample([*fields], 2)}
    # Lists have one item: only a real API server refuses two items with the same key.
    values = {key: value[:1] if isinstance(value, list) else value for key, value in values.items()}
    values.get("resources", {}).pop("claims", None)
    values |= {key: None for key in values if rng.random() < 0.1}
    container = values | {"name": rng.choice(("sidecar", "payload"))}
    kind = rng.choice(("vLLM", "SGLang"))
    return {
        "model": {"name": "m"},
        "engine": {"kind": kind, "podTemplate": {"spec": {"initContainers": [container]}}},
        "tiers": {"memory": {"size": "1Gi"}},
    }


def _keep_first(part: Object, name: str) -> None:
    """Leave only the first of the alternatives in a field; without any, remove the field."""
    alternatives = part.get(name) or {}
    for other in list(alternatives)[1:]:
        del alternatives[other]
    if not alternatives:
        part.pop(name, None)


def _obey_rules(spec: Object) -> None:
    """Make the spec obey rules between fields. Otherwise they would refuse nearly every spec."""
    engine, tiers = spec.get("engine") or {}, spec["tiers"]
    if gpu := engine.get("gpu"):
        gpu["count"] = 1 if gpu.get("count") else 0
        if "deviceClassName" in gpu:
            gpu.pop("resourceName", None)
    split = "data" if (engine.pop("parallelism", None) or {}).get("expert") else "tensor"
    if engine.get("nodes", 1) > 1 and engine.get("kind") != "SGLang" and "prefill" not in engine:
        engine |= {"nodes": 2, "parallelism": {split: 2}}
    else:
        engine.pop("nodes", None)
        engine.pop("topologyKey", None)
    if engine.get("kind") == "SGLang" or "nodes" in engine or "prefill" in engine:
        engine.get("blend", {}).pop("mode", None)
    if engine.get("kind") == "SGLang":
        sidecar = spec.get("sidecar") or {}
        sidecar.pop("chunkTokens", None)
        sidecar.pop("transfer", None)
        engine.pop("hintsRoute", None)
    if "replicas" in engine:
        engine["replicas"] %= 2
    peers = tiers.get("peers") or {}
    _keep_first(peers, "tls")
    if prefill := engine.get("prefill"):
        _obey_prefill(spec, engine, prefill)
    remote = tiers.get("remote") or {}
    _keep_first(tiers, "remote")
    _keep_first(remote.get("managed") or {}, "tls")
    for amounts in (remote.get("managed") or {}).get("resources", {}).values():
        if isinstance(amounts, dict):
            amounts.pop("memory", None)
    _obey_bounds(spec.get("autoscaling") or {}, is_managed="managed" in remote)
    spec.setdefault("model", {"name": "m"})
    spec.setdefault("engine", {})
    tiers.setdefault("memory", {"size": "1Gi"})
    if "clients" in spec:  # a random network or expression is hardly ever valid
        spec["clients"] = [{"podSelector": {"matchLabels": {"key": "a"}}} for _ in spec["clients"]]
    if tenants := spec.get("tenants"):
        _obey_tenants(spec, tenants)


def _obey_tenants(spec: Object, tenants: Object) -> None:
    """Give tenants different names and salts, and shares and a router that fit them."""
    if spec["engine"].get("kind") == "SGLang":
        tenants.pop("header", None)
    if "router" in spec:
        spec["router"]["policy"] = "PowerOfTwo"
    tenants.get("default", {}).pop("memoryPercent", None)
    for number, tenant in enumerate(tenants.get("named", ())):
        tenant["name"] = f"t{number}"
        tenant.pop("memoryPercent", None)
        if secret := tenant.get("saltSecretRef"):
            secret["name"] = f"salt-{number}"
            tenant.pop("saltHash", None)
        else:
            tenant["saltHash"] = f"{number:064x}"


def _obey_prefill(spec: Object, engine: Object, prefill: Object) -> None:
    """Give prefill pods what they need: vLLM, a router, peers, and as many GPUs as the other pods have."""
    engine["kind"] = "vLLM"
    spec.setdefault("router", {})
    spec["tiers"].setdefault("peers", {})
    if "replicas" in prefill:
        prefill["replicas"] %= 2
    if gpu := prefill.get("gpu"):
        gpu["count"] = engine.get("gpu", {}).get("count", 1)
        if "deviceClassName" in gpu:
            gpu.pop("resourceName", None)


def _obey_bounds(scaling: Object, *, is_managed: bool) -> None:
    """Make the declared sizes lie within their bounds."""
    if memory := scaling.get("memory"):
        memory |= {name: size for name, size in (("minSize", "64Mi"), ("maxSize", "16Ti")) if name in memory}
    if "remote" in scaling:
        scaling["remote"] = {"maxShards": 64}
        if not is_managed:
            del scaling["remote"]
    if not scaling.get("memory") and "remote" not in scaling:
        scaling.pop("mode", None)


def _value(schema: Object, name: str, rng: random.Random, level: int) -> Any:
    if name in _EXAMPLES and level < 5:
        return rng.choice(_EXAMPLES[name])
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return rng.choice((0, 1, "1", "100m", "1Gi", 8000))
    match schema.get("type"):
        case "object":
            return _object(schema, rng, level)
        case "array":
            return [_value(schema["items"], name, rng, level + 1) for _ in range(rng.choice((0, 1, 1, 2)))]
        case "integer":
            low, step = schema.get("minimum", 0), schema.get("multipleOf", 1)
            return low + step * rng.randrange(min(3, (schema.get("maximum", 3) - low) // step + 1))
        case "boolean":
            return rng.random() < 0.5
        case "number":
            return rng.random()
    if schema.get("format") == "date-time":
        return "2026-01-01T00:00:00Z"
    if "pattern" in schema:
        return rng.choice(string.ascii_lowercase) + rng.choice(("", "1", "b"))
    return rng.choice(_WORDS)


def _object(schema: Object, rng: random.Random, level: int) -> Object:
    if "properties" not in schema:
        inner = schema.get("additionalProperties")
        return {"key": _value(inner, "", rng, level + 1)} if inner and rng.random() < 0.5 else {}
    required = schema.get("required", ())
    # Few of the many fields of a pod, and about half of the fields of this project.
    share = 0 if level > _MAX_LEVELS else min(0.5, 2.5 / len(schema["properties"]))
    return {
        name: None if field.get("nullable") and rng.random() < 0.03 else _value(field, name, rng, level + 1)
        for name, field in schema["properties"].items()
        if name in required or rng.random() < share
    }


def _break(spec: Object, rng: random.Random) -> None:
    """Replace one value, remove it, or add an unknown field next to it."""
    parent, key = rng.choice(list(_places(spec)))
    match rng.randrange(4):
        case 0 if isinstance(parent, dict):
            parent["unknown"] = rng.choice(_ODD)
        case 1:
            del parent[key]
        case _:
            parent[key] = rng.choice(_ODD)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict | list):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(item)
