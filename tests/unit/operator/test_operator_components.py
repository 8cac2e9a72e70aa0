"""A second component needs no change anywhere else; and what every component promises."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import kopf
import pytest
import yaml
from lmcache_operator import components
from lmcache_operator.api.parse import parse
from lmcache_operator.components import COMPONENTS, kinds_of
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import spec_hash
from lmcache_operator.errors import RefusedError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref, ref_of
from lmcache_operator.specs.names import AUTOSCALING, STOCK_IMAGES

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster
from tests.harness.operator_router import Router

BOTH = (*COMPONENTS, Router())
FULLEST = {"replicas": 2, "gpu": {"deviceClassName": "gpu.nvidia.com"}}
"""An engine with which every component has all the objects that it may have."""
SHARDS = {"remote": {"managed": {"memoryPerShard": "1Gi", "tls": {"issuerRef": {"name": "caches"}}}}}
ROUTER, CONFIG = Ref("StatefulSet", "demo-router"), Ref("ConfigMap", "demo-router")


class Rig:
    """A cluster with an engine and a router."""

    def __init__(self, replicas: int) -> None:
        self.world = World(cluster(engine={"replicas": replicas}))
        api = cast(KubeApi, self.world)
        self.reconciler = Reconciler(api, Context(STOCK_IMAGES), self.world.ask, components=BOTH)

    def run(self) -> list[str]:
        """Reconcile once; what was written."""
        self.world.writes.clear()
        asyncio.run(self.reconciler.reconcile(ClusterKey(NAMESPACE, NAME, UID)))
        return list(self.world.writes)

    def settle(self) -> list[str]:
        """Reconcile and run the controllers in turn, until nothing is written; what was."""
        written = []
        for _ in range(10):
            self.world.run_stateful_sets()
            if not (writes := self.run()):
                return written
            written += writes
        raise AssertionError(f"does not come to rest: {written}")

    def conditions(self) -> dict[str, str]:
        return {c["type"]: c["status"] for c in self.world.resource["status"]["conditions"]}

    def message(self, kind: str) -> str:
        (found,) = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return str(found["message"])


def test_a_component_that_is_wanted_is_rendered_applied_and_told() -> None:
    rig = Rig(replicas=2)
    assert rig.run()[-3:] == [f"apply {CONFIG}", f"apply {ROUTER}", "status"]
    rig.settle()
    assert rig.conditions()["RouterAvailable"] == rig.conditions()["Ready"] == "True"
    assert rig.message("Ready") == "2 of 2 engine pods are ready; the router serves"
    assert rig.world.resource["status"]["replicas"] == 2


def test_a_component_on_its_way_makes_the_cluster_unready() -> None:
    rig = Rig(replicas=2)
    rig.settle()
    rig.world.set_ready("demo-router-0", False)
    rig.run()
    assert (rig.conditions()["RouterAvailable"], rig.conditions()["Ready"]) == ("False", "False")
    assert rig.conditions()["EngineAvailable"] == "True"
    assert rig.message("Progressing") == rig.message("Ready") == ""


def test_only_pods_with_a_sidecar_are_asked_how_it_is() -> None:
    rig = Rig(replicas=2)
    rig.settle()
    for number, pod in enumerate(rig.world.pods.values()):
        pod["status"] |= {"phase": "Running", "podIP": f"10.0.0.{number}"}
        rig.world.stats[f"10.0.0.{number}"] = {"is_ready": True, "num_clients": {"attached": 1}}
    rig.run()
    assert len(rig.world.pods) == 3
    assert rig.world.num_asked == 2
    assert rig.message("SidecarAttached") == "2 of 2 engines use their sidecars"


def test_what_is_not_wanted_any_more_is_deleted_dependents_first() -> None:
    rig = Rig(replicas=2)
    rig.settle()
    rig.world.change(engine={"replicas": 1})
    written = rig.settle()
    assert [write for write in written if write.startswith("delete")] == [
        f"delete {ROUTER}", f"delete {CONFIG}",
    ]  # fmt: skip
    assert not {ROUTER, CONFIG} & rig.world.objects.keys()
    assert "RouterAvailable" not in rig.conditions()
    assert rig.conditions()["Ready"] == "True"
    rig.world.change(engine={"replicas": 3})
    rig.settle()
    assert {ROUTER, CONFIG} <= rig.world.objects.keys()


@pytest.mark.parametrize("change", ["another owner", "no label", "ending"])
def test_what_is_not_ours_is_never_deleted(change: str) -> None:
    rig = Rig(replicas=2)
    rig.settle()
    metadata = rig.world.objects[CONFIG]["metadata"]
    if change == "another owner":
        metadata["ownerReferences"][0]["uid"] = "of somebody else"
    elif change == "no label":
        del metadata["labels"]["app.kubernetes.io/managed-by"]
    else:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    rig.world.change(engine={"replicas": 1})
    written = rig.settle()
    assert f"delete {ROUTER}" in written
    assert f"delete {CONFIG}" not in written


def test_an_object_that_took_the_name_meanwhile_is_not_deleted() -> None:
    """What was observed is deleted, by its uid, or nothing."""
    rig = Rig(replicas=2)
    rig.settle()
    rig.world.change(engine={"replicas": 1})
    rig.world.replaced.add(CONFIG)
    rig.run()
    assert CONFIG in rig.world.objects


def test_a_refused_deletion_is_told() -> None:
    rig = Rig(replicas=2)
    rig.settle()
    rig.world.change(engine={"replicas": 1})
    rig.world.failures["delete ConfigMap"] = RefusedError("delete", "no right to it")
    rig.run()
    assert rig.message("Degraded") == f"deletion of {CONFIG}: no right to it"
    assert ROUTER not in rig.world.objects


def test_a_name_that_is_taken_stops_no_other_component() -> None:
    rig = Rig(replicas=2)
    rig.world.objects[CONFIG] = {"metadata": {"name": "demo-router", "uid": "1", "labels": {}}}
    rig.settle()
    assert rig.message("Degraded").startswith(f"{CONFIG} exists and belongs to somebody else")
    assert rig.conditions()["EngineAvailable"] == "True"
    rig.world.change(engine={"replicas": 1})
    rig.settle()
    assert rig.world.objects[CONFIG]["metadata"]["uid"] == "1"


def test_an_invalid_spec_leaves_every_component_as_it_is() -> None:
    rig = Rig(replicas=2)
    rig.settle()
    rig.world.change(engine={"replicas": 1, "args": ["--port=1"]})
    assert rig.run() == ["status"]
    assert rig.message("Degraded").count("--port") == 1


def test_its_kinds_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmcache_operator import app
    from lmcache_operator.queue import KeyedQueue

    class Widgets(Router):
        def refs(self, cluster_name: str) -> tuple[Ref, ...]:
            return (Ref("LMCacheCluster", cluster_name),)

    async def work(_: ClusterKey) -> None:
        return None

    def watched() -> int:
        registry = app.build_registry(KeyedQueue(work, num_workers=1), asyncio.Event().wait)
        assert isinstance(registry, kopf.OperatorRegistry)
        return len(registry._watching.get_all_handlers())

    before = watched()
    monkeypatch.setattr(app, "COMPONENTS", (*components.COMPONENTS, Widgets()))
    assert watched() == before + 1


# -- every component


@pytest.mark.parametrize("component", BOTH, ids=lambda component: component.name)
def test_what_is_rendered_is_what_is_looked_for(component: Any) -> None:
    rendered = component.render(parse(cluster(engine=FULLEST, tiers=SHARDS)), Context(STOCK_IMAGES))
    if component.name == AUTOSCALING:  # what it has follows from what was watched
        assert not rendered
        return
    assert sorted(map(ref_of, rendered)) == sorted(component.refs(NAME))
    assert list(map(ref_of, rendered))[-1] == component.refs(NAME)[-1]


def test_no_two_components_have_an_object_in_common() -> None:
    refs = [ref for component in BOTH for ref in component.refs(NAME)]
    assert len(refs) == len(set(refs))
    assert set(kinds_of(BOTH)) == set(kinds_of(COMPONENTS))


def test_the_spec_hash_is_that_of_the_operators_before() -> None:
    """Pods with another one are replaced: an upgrade of the operator would restart every engine."""
    assert spec_hash(parse(cluster()), STOCK_IMAGES) == "bae94452763bf7ec"
    remote = {"external": {"url": "redis://h", "authSecretRef": {"name": "auth"}}}
    engine = {
        "args": ["--x"],
        "image": "e:1",
        "replicas": 2,
        "gpu": {"count": 2},
        "parallelism": {"tensor": 2},
    }
    declared = parse(cluster(engine=engine, sidecar={"chunkTokens": 512}, tiers={"remote": remote}))
    assert spec_hash(declared, STOCK_IMAGES) == "f81dda7d7f056f25"


def test_the_chart_gives_the_rights_that_the_components_need_and_no_other() -> None:
    """Deleted is only what is not always wanted, or what nobody can change."""
    chart = Path(__file__).resolve().parents[3] / "charts" / "lmcache-operator" / "templates"
    _, _, rest = (chart / "_helpers.tpl").read_text().partition('define "lmcache-operator.rules" -}}')
    rules = yaml.safe_load(rest.partition("{{- end }}")[0])
    rights = {
        (group, plural): rule["verbs"]
        for rule in rules
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        if "patch" in rule["verbs"] and "/" not in plural and plural not in ("events", "pods")
    }
    verbs = ["get", "list", "watch", "create", "patch"]
    resource, context = parse(cluster()), Context(STOCK_IMAGES)
    always = {ref_of(child) for own in COMPONENTS for child in own.render(resource, context)}
    sometimes = {ref.kind for own in COMPONENTS for ref in own.refs(NAME) if ref not in always}
    assert rights == {
        (kind.group, kind.plural): [*verbs, "delete"] if kind.kind in sometimes else verbs
        for kind in kinds_of(COMPONENTS)
    }
    assert [rule["verbs"] for rule in rules if "secrets" in rule["resources"]] == [["create"]]
