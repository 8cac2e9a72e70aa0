"""LMCacheClusters and an in-memory API server, for tests that need no control plane.

It stores applied objects, answers reads, creates pods for StatefulSets, and sets defaults like the API
server. It is a simplification: behaviour that depends on a real API server is tested with a real one.
"""

import copy
import itertools
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from lmcache_operator.api import HEARTBEAT
from lmcache_operator.errors import RefusedError
from lmcache_operator.specs.kinds import CLUSTER, EVENT, NODE, POD, Kind, Ref, controller_uid
from lmcache_operator.specs.merge import ITEM_KEYS, merge
from lmcache_operator.specs.names import FIELD_MANAGER, HEARTBEAT_MANAGER, RESIZE_REFUSED

Object = dict[str, Any]
MINIMAL_SPEC: Object = {"model": {"name": "org/model"}, "engine": {}, "tiers": {"memory": {"size": "1Gi"}}}
NAMESPACE, NAME, UID = "team", "demo", "0e7a4a2c-0000-4000-8000-000000000001"


def secret_of(purpose: str, name: str = NAME, uid: str = UID) -> Ref:
    """The Secret that the operator or cert-manager creates for a cluster."""
    return Ref("Secret", f"{name}-{purpose}-{uid}")


def cluster(spec: Object | None = None, **changes: Object) -> Object:
    """An LMCacheCluster as the API server returns it. `changes` are merged into its spec."""
    metadata = {"name": NAME, "namespace": NAMESPACE, "uid": UID, "generation": 1}
    return {
        "apiVersion": CLUSTER.api_version,
        "kind": CLUSTER.kind,
        "metadata": metadata,
        "spec": merge(copy.deepcopy(spec or MINIMAL_SPEC), changes),
    }


def _fields(value: Any) -> Object:
    """Fields that the API server records as applied: every leaf, and named items of lists by name."""
    if isinstance(value, dict):
        leaves = ("selector", "matchLabels", "podSelector")
        return {
            f"f:{key}": {} if key in leaves else _fields(item) for key, item in value.items() if item != []
        }
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        for key in (*ITEM_KEYS, "uid"):
            if all(key in item for item in value):
                return {f"k:{json.dumps({key: item[key]})}": {".": {}, **_fields(item)} for item in value}
    return {}


def _without(value: Any, owned: Object, applied: Object) -> Any:
    """A value without the fields that were applied the last time and are not applied any more."""
    if isinstance(value, dict):
        names = {key: f"f:{key}" for key in value}
        remaining = [key for key, name in names.items() if name in applied or name not in owned]
        return {
            key: _without(value[key], owned.get(names[key], {}), applied.get(names[key], {}))
            for key in remaining
        }
    if isinstance(value, list) and any(name.startswith("k:") for name in owned):
        items = []
        for item in value:
            item_names = {f"k:{json.dumps({key: item[key]})}" for key in (*ITEM_KEYS, "uid") if key in item}
            if not item_names & owned.keys() - applied.keys():
                name = next(iter(item_names & owned.keys()), "")
                items.append(_without(item, owned.get(name, {}), applied.get(name, {})))
        return items
    return value


_KEYED_BY_NAME = ("containers", "initContainers", "volumes", "env", "resourceClaims", "imagePullSecrets")


def _refuse_duplicates(value: Any, path: str = "") -> None:
    """Refuse list items of equal names, as the API server does: it could not tell which one is meant."""
    if isinstance(value, list):
        names = [item["name"] for item in value if isinstance(item, dict) and "name" in item]
        if path.rpartition(".")[2] in _KEYED_BY_NAME and len(names) > len(set(names)):
            raise RefusedError(
                "apply", f"failed to create typed patch object: {path}: duplicate entries for key"
            )
        for item in value:
            _refuse_duplicates(item, path)
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_duplicates(item, f"{path}.{key}")


class World:
    """An in-memory `KubeApi`. `writes` lists the calls that changed something."""

    def __init__(self, resource: Object) -> None:
        self.resource = resource
        self.objects: dict[Ref, Object] = {}
        self.pods: dict[str, Object] = {}
        self.nodes: dict[str, Object] = {}
        self.warnings: list[Object] = []
        self.events: list[tuple[str, str]] = []
        self.writes: list[str] = []
        self.failures: dict[str, Exception] = {}
        """Exceptions of calls, by the name of the call, or by call and kind, such as "apply Service"."""
        self.replaced: set[Ref] = set()
        """Objects that are replaced by foreign objects while they are being deleted."""
        self.is_namespace_ending = False
        self.serves_pod_groups = False
        self.evictions_allowed = True
        self.stats: dict[str, Any] = {}
        """Answers of sidecars, by the IP addresses of their pods."""
        self.num_stats_reads = 0
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        """Time of the API server."""
        self._uids = itertools.count(100)

    async def ask(self, address: str, _uid: str = "") -> Any:
        """A sidecar's /stats. None if it does not answer."""
        self.num_stats_reads += 1
        return self.stats.get(address)

    # -- calls of KubeApi

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        self._raise_failure("get", kind.kind)
        if kind == NODE:
            return copy.deepcopy(self.nodes.get(name))
        is_cluster = kind == CLUSTER and name == NAME
        obj = self.resource if is_cluster else self.objects.get(Ref(kind.kind, name))
        return copy.deepcopy(obj)

    async def serves(self, kind: Kind) -> bool:
        assert kind.kind == "PodGroup"
        self._raise_failure("serves")
        return self.serves_pod_groups

    async def find(
        self, kind: Kind, namespace: str, part: Callable[[Object], Object] = copy.deepcopy, **selectors: str
    ) -> list[Object]:
        return [part(copy.deepcopy(each)) for each in self._matching(kind, **selectors)]

    def _matching(self, kind: Kind, *, labelSelector: str = "", fieldSelector: str = "") -> list[Object]:
        self._raise_failure("find", kind.kind)
        if kind == EVENT:
            fields = dict(pair.split("=") for pair in fieldSelector.split(","))
            assert fields.pop("type", "Warning") == "Warning"
            about = {key.removeprefix("involvedObject."): value for key, value in fields.items()}
            return [event for event in self.warnings if about.items() <= event["involvedObject"].items()]
        if kind == NODE:
            return [*self.nodes.values()]
        if kind == CLUSTER:
            clusters = [obj for ref, obj in self.objects.items() if ref.kind == CLUSTER.kind]
            return [self.resource, *clusters]
        if name := fieldSelector.removeprefix("metadata.name="):
            return [pod for pod_name, pod in self.pods.items() if pod_name == name]
        labels = dict(pair.split("=") for pair in labelSelector.split(","))
        children = [
            {key: value for key, value in child.items() if key not in ("apiVersion", "kind")}  # as in lists
            for ref, child in self.objects.items()
            if ref.kind == kind.kind
        ]
        listed = [*self.pods.values()] if kind == POD else children
        return [each for each in listed if labels.items() <= each["metadata"]["labels"].items()]

    async def is_ending(self, namespace: str) -> bool:
        return self.is_namespace_ending

    async def post_event(self, about: Object, kind: str, reason: str, message: str, now: datetime) -> None:
        self.events.append((kind, reason))

    async def create(self, kind: Kind, wanted: Object) -> Object | None:
        self._raise_failure("create", kind.kind)
        ref = Ref(kind.kind, wanted["metadata"]["name"])
        if ref in self.objects:
            return None
        self.writes.append(f"create {ref}")
        stored = self.objects[ref] = copy.deepcopy(wanted)
        stored["metadata"]["uid"] = str(next(self._uids))
        return stored

    async def apply(self, wanted: Object, uid: str | None) -> None:
        ref = Ref(wanted["kind"], wanted["metadata"]["name"])
        self._raise_failure("apply", ref.kind)
        _refuse_duplicates(wanted)
        self.writes.append(f"apply {ref}")
        if uid is None:
            assert ref not in self.objects
        before = self.objects.get(ref, {"metadata": {"uid": str(next(self._uids)), "generation": 0}})
        assert uid in (None, before["metadata"]["uid"])
        fields = _fields({k: v for k, v in wanted.items() if k not in ("apiVersion", "kind")})
        for name in ("f:name", "f:namespace"):
            del fields["f:metadata"][name]
        for entry in before["metadata"].get("managedFields", ()):
            before = _without(before, entry["fieldsV1"], fields)
        live = merge(before, copy.deepcopy(wanted))
        live["metadata"]["generation"] += 1
        entry = {"manager": FIELD_MANAGER, "operation": "Apply", "fieldsV1": fields}
        live["metadata"]["managedFields"] = [entry]
        self.objects[ref] = live
        self._settle(live)

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, grace_seconds: int | None = None
    ) -> bool:
        self._raise_failure("delete", kind.kind)
        if kind == POD:
            self.writes.append(f"delete by force {name}" if grace_seconds == 0 else f"delete pod {name}")
            return self.pods.pop(name)["metadata"]["uid"] == uid
        ref = Ref(kind.kind, name)
        if self.objects[ref]["metadata"]["uid"] != uid or ref in self.replaced:
            return False
        self.writes.append(f"delete {ref}")
        del self.objects[ref]
        self.pods = {k: pod for k, pod in self.pods.items() if controller_uid(pod) != uid}
        return True

    async def apply_status(self, wanted: Object, manager: str = FIELD_MANAGER) -> Object | None:
        """Apply the status as the API server does: the heartbeat has an owner of its own."""
        self._raise_failure("heartbeat" if manager == HEARTBEAT_MANAGER else "status")
        status = copy.deepcopy(wanted["status"])
        if manager == HEARTBEAT_MANAGER:
            self.writes.append("heartbeat")
            self.resource["status"] |= status
        else:
            self.writes.append("status")
            assert HEARTBEAT not in status
            heartbeat = {
                key: time for key, time in self.resource.get("status", {}).items() if key == HEARTBEAT
            }
            self.resource["status"] = status | heartbeat
        return copy.deepcopy(self.resource)

    def edit(self, ref: Ref, *path: str, value: Any) -> None:
        """Set a field as another owner, or remove it (None). The operator does not own it any more."""
        live = self.objects[ref]
        fields = live["metadata"]["managedFields"][0]["fieldsV1"]
        parents = []
        for name in path[:-1]:
            parents.append((fields, f"f:{name}"))
            live, fields = live[name], fields.get(f"f:{name}", {})
        live[path[-1]] = value
        if value is None:
            del live[path[-1]]
        fields.pop(f"f:{path[-1]}", None)
        for parent, name in reversed(parents):
            if parent.get(name) == {}:
                del parent[name]

    def _raise_failure(self, call: str, kind: str = "") -> None:
        for name in (call, f"{call} {kind}"):
            if name in self.failures:
                raise self.failures[name]

    async def evict(self, namespace: str, pod: str, uid: str) -> bool:
        self._raise_failure("evict")
        if self.evictions_allowed:
            self.writes.append(f"evict {pod}")
            assert self.pods.pop(pod)["metadata"]["uid"] == uid
        return self.evictions_allowed

    async def resize(self, pod: Object, init_container: str, resources: Object) -> None:
        """Set a sidecar's resources. A kubelet has to grant them."""
        live = self._same(pod, "resize")
        (container,) = (c for c in live["spec"]["initContainers"] if c["name"] == init_container)
        self.writes.append(f"resize {pod['metadata']['name']}")
        container["resources"] = merge(container["resources"], copy.deepcopy(resources))
        live["metadata"]["generation"] = live["metadata"].get("generation", 1) + 1
        time = self.now.isoformat(timespec="seconds")
        entry = {"manager": FIELD_MANAGER, "operation": "Apply", "subresource": "resize", "time": time}
        live["metadata"]["managedFields"] = [entry]

    async def annotate(self, pod: Object, annotations: Object) -> None:
        """Set all of the operator's annotations on a pod. Annotations that are not named are removed."""
        live = self._same(pod, "annotate")
        self.writes.append(f"annotate {pod['metadata']['name']}")
        unchanged = {k: v for k, v in live["metadata"]["annotations"].items() if k != RESIZE_REFUSED}
        live["metadata"]["annotations"] = unchanged | annotations

    def _same(self, pod: Object, call: str) -> Object:
        self._raise_failure(call)
        live = self.pods.get(pod["metadata"]["name"])
        if live is None or live["metadata"]["uid"] != pod["metadata"]["uid"]:
            raise RefusedError(call, "metadata.uid: field is immutable")
        return live

    # -- effects of users and controllers

    def change(self, **changes: Object) -> None:
        """Edit the spec as a user."""
        self.resource["spec"] = merge(self.resource["spec"], changes)
        self.resource["metadata"]["generation"] += 1

    def run_stateful_sets(self, *, is_ready: bool = True) -> None:
        """Create missing pods from the current template, and remove superfluous pods."""
        for live in [o for r, o in self.objects.items() if r.kind == "StatefulSet"]:
            live["status"] = {"observedGeneration": live["metadata"]["generation"]}
            names = [f"{live['metadata']['name']}-{n}" for n in range(live["spec"]["replicas"])]
            unchanged = {k: p for k, p in self.pods.items() if controller_uid(p) != live["metadata"]["uid"]}
            self.pods = unchanged | {name: pod for name, pod in self.pods.items() if name in names}
            for name in names:
                self.pods.setdefault(name, self._pod(name, live, is_ready))

    def set_ready(self, name: str, is_ready: bool) -> None:
        """Change a pod's readiness."""
        self.pods[name]["status"] = {"conditions": [{"type": "Ready", "status": str(is_ready)}]}

    def _pod(self, name: str, owner: Object, is_ready: bool) -> Object:
        template = copy.deepcopy(owner["spec"]["template"])
        owners = [{"kind": "StatefulSet", "uid": owner["metadata"]["uid"], "controller": True}]
        template["metadata"] |= {"name": name, "uid": str(next(self._uids)), "ownerReferences": owners}
        return template | {"status": {"conditions": [{"type": "Ready", "status": str(is_ready)}]}}

    def _settle(self, live: Object) -> None:
        """Set defaults and canonical quantities in a few places where they differ from the applied object."""
        live["metadata"]["resourceVersion"] = str(next(self._uids))
        if live["kind"] == "StatefulSet":
            pod = live["spec"]["template"]["spec"]
            pod.setdefault("dnsPolicy", "ClusterFirst")
            for container in pod["containers"] + pod.get("initContainers", []):
                container.setdefault("imagePullPolicy", "IfNotPresent")
                limits = (container.get("resources") or {}).get("limits") or {}
                if limits.get("memory") == "1024Mi":
                    limits["memory"] = "1Gi"
            pod["containers"][0].setdefault("env", []).append(
                {"name": "INJECTED", "value": "by another owner"}
            )
            pod["containers"][0]["env"] = list({e["name"]: e for e in pod["containers"][0]["env"]}.values())
