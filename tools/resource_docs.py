"""Render ``docs/reference/resource.md``: all fields of the custom resource, from their declarations."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from lmcache_operator.api import API_VERSION, KIND
from lmcache_operator.api.fields import Field, Part, is_part
from lmcache_operator.api.keywords import CLUSTER_NAME
from lmcache_operator.api.types import Spec, Status
from lmcache_operator.contract.conditions import Expected, Trouble, runbook

COMPLETE = """\
apiVersion: lmcache.io/v1alpha1
kind: LMCacheCluster
metadata:
  name: llama-70b
spec:
  model:
    name: meta-llama/Llama-3.3-70B-Instruct
    revision: main
    tokenSecretRef: {name: hf, key: token}
    volume: {persistentVolumeClaim: {claimName: models}}
  engine:
    kind: vLLM
    image: vllm/vllm-openai:v0.32.0
    replicas: 2
    gpu: {count: 8, deviceClassName: gpu.nvidia.com, runtimeClassName: nvidia}
    parallelism: {tensor: 4, pipeline: 2}
    args: ["--max-model-len=32768"]
    env: [{name: VLLM_LOGGING_LEVEL, value: DEBUG}]
    resources: {requests: {cpu: 16, memory: 128Gi}, limits: {memory: 192Gi}}
    sharedMemorySize: 16Gi
    hintsRoute: true
    nodeSelector: {nvidia.com/gpu.product: NVIDIA-H200}
    tolerations: [{key: nvidia.com/gpu, operator: Exists}]
    topologySpreadConstraints:
      - {maxSkew: 1, topologyKey: topology.kubernetes.io/zone, whenUnsatisfiable: ScheduleAnyway}
    priorityClassName: serving
    prefill:
      replicas: 1
      gpu: {count: 8, deviceClassName: gpu.nvidia.com, runtimeClassName: nvidia}
      args: ["--max-num-batched-tokens=32768"]
      resources: {requests: {cpu: 32, memory: 128Gi}}
      nodeSelector: {nvidia.com/gpu.product: NVIDIA-B200}
      tolerations: [{key: prefill, operator: Exists}]
    podTemplate: {metadata: {labels: {team: search}}, spec: {terminationGracePeriodSeconds: 660}}
  sidecar:
    image: ghcr.io/lmcache-cluster/sidecar:0.1.0
    chunkTokens: 256
    httpAuthentication: Token
    transfer: CudaIPC
  images: {policy: Follow, pullSecrets: [registry]}
  tiers:
    memory: {size: 256Gi, retainPercent: 30, maxTtlSeconds: 7200}
    disk: {size: 2Ti, storageClassName: local-nvme, encryption: {secretRef: {name: kv-keys}}}
    peers:
      bytesPerSecond: 1Gi
      tls: {issuerRef: {name: caches, kind: ClusterIssuer, group: cert-manager.io}}
      clusterRef: {name: llama-70b-chat}
    remote:
      external:
        url: rediss://kv.caches.svc:6379/0?verify=ca
        authSecretRef: {name: kv-auth, usernameKey: username, passwordKey: password}
      encryption: {secretRef: {name: kv-keys}}
    admit: OnReuse
  tenants:
    default: {memoryPercent: 30, lowerTierBytes: 100Gi, priority: -10, retainPercent: 10}
    named:
      - name: search
        saltSecretRef: {name: search-salt, key: salt}
        memoryPercent: 50
        minMemoryPercent: 20
        lowerTierBytes: 500Gi
        priority: 10
        retainPercent: 50
      - name: batch
        saltHash: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        memoryPercent: 10
        priority: -100
  router:
    policy: CacheAware
    replicas: 2
    image: ghcr.io/lmcache-cluster/router:0.1.0
    args: ["--request-timeout-secs=3600"]
    resources: {requests: {cpu: 1, memory: 1Gi}}
  clients:
    - namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: gateway}}
      podSelector: {matchLabels: {app: gateway}}
    - ipBlock: {cidr: 10.1.0.0/16, except: [10.1.7.0/24]}
  autoscaling:
    mode: Auto
    memory: {minSize: 64Gi, maxSize: 512Gi}
    prices: {gpuHour: "2.50", memoryGiBHour: "0", shardGiBHour: "0.004"}
"""
"""An object with all fields that do not exclude one another."""
_MANAGED = {
    "shards": 3,
    "memoryPerShard": "32Gi",
    "access": "Cluster",
    "tls.secretRef.name": "kv-certificate",
    "tls.issuerRef.name": "caches",
    "tls.issuerRef.kind": "ClusterIssuer",
    "tls.issuerRef.group": "cert-manager.io",
    "image": "valkey/valkey:8.1.4",
    "resources": {"requests": {"cpu": 2}},
    "nodeSelector": {"pool": "caches"},
    "tolerations": [{"key": "caches", "operator": "Exists"}],
    "priorityClassName": "serving",
}
_EXCLUSIVE = {
    "spec.engine.gpu.resourceName": "nvidia.com/gpu",
    "spec.engine.nodes": 2,
    "spec.engine.blend.mode": "Request",
    "spec.engine.blend.selection": "Deviation",
    "spec.engine.blend.ratioPercent": 20,
    "spec.engine.blend.minTokens": 1024,
    "spec.engine.blend.separator": "<|separator|>",
    "spec.engine.topologyKey": "topology.kubernetes.io/rack",
    "spec.engine.prefill.gpu.resourceName": "nvidia.com/gpu",
    **{f"spec.tiers.remote.managed.{name}": value for name, value in _MANAGED.items()},
    "spec.tiers.remote.clusterRef.name": "kv",
    "spec.tiers.peers.tls.secretRef.name": "llama-70b-certificate",
    "spec.tenants.header": True,
    "spec.tenants.named[].saltHash": "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae",
    "spec.autoscaling.remote.minShards": 2,
    "spec.autoscaling.remote.maxShards": 8,
}
"""Example values of fields that exclude a field of ``COMPLETE``, by path."""
CONDITIONS = {
    "Ready": "At least one pod of each part serves. The reason `Ready` says that all pods match the spec.",
    "Progressing": "The operator is creating or replacing pods.",
    "Degraded": "A problem needs you: the message says what to do. Engines may still serve requests.",
    "EngineAvailable": "At least one engine is Ready.",
    "SidecarAttached": "The engines use their caches.",
    "RemoteTierAvailable": "All shards of a managed remote tier are Ready.",
    "RemoteTierReachable": "The remote tier answers the sidecars. Present after a sidecar reported it.",
    "PrefillAvailable": "At least one prefill pod is Ready. Present with spec.engine.prefill.",
    "RouterAvailable": "At least one router pod is Ready. Present with spec.router.",
    "AutoscalingActive": "The operator sizes tiers by lookups. Present after it read the first samples.",
    "MemoryTierPinned": "CUDA has pinned the memory tiers of all GPUs. Present after a sidecar reported it.",
    "KVShared": "The KV of no engine is private. Present after a sidecar with one reported it.",
    "TokensRequired": "All sidecars ask for tokens. Present with sidecar.httpAuthentication Token.",
    "TenantsKnown": "The sidecars use the declared tenants. Present with spec.tenants.",
    "DiskTierAvailable": "Every disk tier is in use. Present after a sidecar reported it.",
    "RowsEncrypted": "All sidecars encrypt the rows of the tiers with encryption. Present with such a tier.",
}
_HEAD = f"""\
# The resource
Generated by `make generate` from `operator/lmcache_operator/api/types.py`.

`{API_VERSION}`, kind `{KIND}`, short name `lmcluster`, namespaced, with the subresources `status` and `scale`
(`spec.engine.replicas`). {CLUSTER_NAME.message.replace("metadata.name", "`metadata.name`")}.
`kubectl explain lmcluster.spec --recursive` shows the same fields. [The guides](../guides/kubernetes.md)
explain how to use them.

The API server refuses an object that breaks a rule below, and names the field. If only the operator can find
a mistake, the condition `Degraded` becomes true with the reason `InvalidSpec`, and the pods stay unchanged.
Examples are a reserved engine argument, or a pod template that changes a field of the cache.

A field's default applies if you leave the field out, so a small object is enough
([examples](../guides/kubernetes.md#examples)). [One object with all fields](#all-fields) is at the end.
"""
_TAIL = f"""
## All fields
This object has all fields that do not exclude one another. It shows where each field belongs, and is no
example to copy:

```yaml
{COMPLETE}```
"""
_NAMES = {str: "string", int: "integer", bool: "boolean"}
_LIMITS = {
    "minimum": "≥ {}", "maximum": "≤ {}", "multipleOf": "a multiple of {}", "maxLength": "≤ {} characters",
    "maxItems": "≤ {} items",
}  # fmt: skip


def render() -> str:
    """Return the text of the page."""
    lines = [_HEAD, "## Spec", *_part(Spec, "spec")]
    lines += ["## Status", *_part(Status, "status"), *_conditions(), _TAIL]
    return "\n".join(lines).rstrip() + "\n"


def examples() -> dict[str, Any]:
    """Return the example value of each field that has no fields of its own, by path."""
    return dict(_examples(Spec, yaml.safe_load(COMPLETE)["spec"], "spec")) | _EXCLUSIVE


def _examples(cls: type[Part], value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for field in cls.FIELDS:
        name, item = f"{path}.{field.json_name}", _item_of(field)
        if field.json_name in value and is_part(field.type):
            yield from _examples(field.type, value[field.json_name], name)
        elif field.json_name in value and is_part(item):
            yield from _examples(item, value[field.json_name][0], f"{name}[]")
        elif field.json_name in value:
            yield name, value[field.json_name]


def _item_of(field: Field) -> Any:
    """Return the type of a list's items, and of any other field its own type."""
    return typing.get_args(field.type)[0] if typing.get_origin(field.type) is list else field.type


def _part(cls: type[Part], path: str) -> Iterator[str]:
    inner: list[tuple[type[Part], str]] = []
    has_examples = path.startswith("spec")
    example_of = examples()
    yield f"### `{path}`\n"
    yield "| field | type | default | " + ("example | " if has_examples else "") + "meaning |"
    yield "|---|---|---|" + ("---|" if has_examples else "") + "---|"
    for field in cls.FIELDS:
        name = f"{path}.{field.json_name}"
        cells = [f"`{field.json_name}`", _type_of(field), _default_of(field)]
        if has_examples:
            # The default of a number or a choice is a good example.
            is_plain = isinstance(field.default, int) or "enum" in field.keywords
            example = example_of.get(name, field.default if is_plain else None)
            if example is None and name not in example_of and not is_part(_item_of(field)):
                raise ValueError(f"tools/resource_docs.py has no example of {name}")
            cells.append("" if example is None else _code(example))
        yield "| " + " | ".join([*cells, _about(field)]) + " |"
        if is_part(item := _item_of(field)):
            inner.append((item, name if item is field.type else f"{name}[]"))
    yield ""
    for rule in cls.RULES:
        yield f"- Rule: “{rule.message}”."
    if cls.RULES:
        yield ""
    for part, name in inner:
        yield from _part(part, name)


def _type_of(field: Field) -> str:
    keywords = field.keywords
    if shape := keywords.get("shape"):
        kind, _, member = shape.partition(".")
        name = f"as `{member}` of a {kind}" if member else f"a part of a {kind}"
    elif typing.get_origin(field.type) is list:
        (item,) = typing.get_args(field.type)
        name = f"list of {'objects' if is_part(item) else _NAMES[item] + 's'}"
    elif "enum" in keywords:
        name = ", ".join(f"`{value}`" for value in keywords["enum"])
    else:
        name = _NAMES.get(field.type, "object")
    limits = [text.format(keywords[key]) for key, text in _LIMITS.items() if key in keywords]
    if "pattern" in keywords:
        limits.append(f"matches {_code(keywords['pattern'])}")
    return ", ".join([name, *limits])


def _default_of(field: Field) -> str:
    if field.is_required:
        return "required"
    return "" if field.default in (None, {}, []) else _code(field.default)


def _about(field: Field) -> str:
    rules = "; ".join(f"“{rule.message}”" for rule in field.rules)
    return f"{field.description} {f'Rules: {rules}.' if rules else ''}".rstrip().replace("|", "\\|")


def _code(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{text}`".replace("|", "\\|")


def _conditions() -> Iterator[str]:
    yield "## Conditions\n"
    yield "| type | meaning of True |"
    yield "|---|---|"
    yield from (f"| `{kind}` | {about} |" for kind, about in CONDITIONS.items())
    yield "\nReasons of a cluster that matches its spec, or is on the way to it:"
    yield ", ".join(f"`{reason}`" for reason in typing.get_args(Expected)) + "."
    yield "\nReasons of a problem. The linked page says what to do:"
    yield ", ".join(_linked(reason) for reason in typing.get_args(Trouble)) + "."


def _linked(reason: str) -> str:
    return f"[`{reason}`](../runbooks/{runbook(reason)})"
