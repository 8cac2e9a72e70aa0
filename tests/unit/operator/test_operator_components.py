"""The component framework: an added component needs no other change, and all components obey the contract."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.components.engine.engine import spec_hash
from lmcache_operator.components.registry import COMPONENTS, kinds_of
from lmcache_operator.contract.base import Component, ComponentStatus, Context, Observed, Plan
from lmcache_operator.contract.conditions import Condition
from lmcache_operator.errors import RefusedError
from lmcache_operator.pods.differences import differences
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import AUTOSCALING, STOCK_IMAGES, child, labels, selector
from tests.harness.operator.components import GOOD, ReconciledCluster
from tests.harness.operator.model import NAME, cluster
from tests.harness.operator.render import children


class Extra(Component):
    """A StatefulSet and a ConfigMap that depend on the number of engine pods."""

    name = "extra"

    def refs(self, cluster_name: str) -> tuple[Ref, ...]:
        return tuple(Ref(kind, f"{cluster_name}-extra") for kind in ("ConfigMap", "StatefulSet"))

    def render(self, cluster: Cluster, context: Context) -> list[dict[str, Any]]:
        if cluster.engine.replicas < 2:
            return []
        name, pods = f"{cluster.name}-extra", selector(cluster.name, self.name)
        pod = {"containers": [{"name": "extra", "image": "registry.example/extra:1"}], "initContainers": []}
        template = {"metadata": {"labels": labels(cluster, self.name)}, "spec": pod}
        spec = {"replicas": 1, "selector": {"matchLabels": pods}, "serviceName": name, "template": template}
        data = {"engines": str(cluster.engine.replicas)}
        return [
            child(cluster, self.name, "ConfigMap", name, data=data),
            child(cluster, self.name, "StatefulSet", name, spec=spec),
        ]

    def plan(self, cluster: Cluster, observed: Observed, context: Context) -> Plan:
        return differences(self.render(cluster, context), observed)

    def status(self, observed: Observed, plan: Plan) -> ComponentStatus:
        if not observed.children or plan.delete:
            return ComponentStatus()
        is_serving = any(map(is_ready, observed.pods))
        serving = Condition("True", "Serving", "the pod answers") if is_serving else None
        waiting = Condition("False", "NotServing", "the pod does not answer")
        progressing = Condition("False", "Complete", "") if is_serving else Condition("True", "Starting", "")
        return ComponentStatus(
            summary="the pod serves",
            progressing=progressing,
            conditions={"ExtraAvailable": serving or waiting},
        )


BOTH = (*COMPONENTS, Extra())
FULL_ENGINE = {"replicas": 2, "gpu": {"deviceClassName": "gpu.nvidia.com"}, "prefill": {}}
"""An engine spec with which components render all their kinds of objects."""
TIERS = {
    "peers": {"tls": {"issuerRef": {"name": "caches"}}},
    "remote": {"managed": {"memoryPerShard": "1Gi", "tls": {"issuerRef": {"name": "caches"}}}},
}
SET, CONFIG = Ref("StatefulSet", "demo-extra"), Ref("ConfigMap", "demo-extra")


class Rig(ReconciledCluster):
    """A cluster with an engine and a further component."""

    def __init__(self, replicas: int) -> None:
        super().__init__(BOTH, engine={"replicas": replicas})


def test_wanted_component_is_applied_and_reported() -> None:
    rig = Rig(replicas=2)
    assert rig.run()[-3:] == [f"apply {CONFIG}", f"apply {SET}", "status"]
    rig.settle()
    assert rig.conditions()["ExtraAvailable"] == rig.conditions()["Ready"] == "True"
    assert rig.message("Ready") == "2 of 2 engine pods are ready; the pod serves"
    assert rig.world.resource["status"]["replicas"] == 2


def test_component_that_is_not_ready_makes_the_cluster_unready() -> None:
    rig = Rig.settled(replicas=2)
    rig.world.set_ready("demo-extra-0", False)
    rig.run()
    assert (rig.conditions()["ExtraAvailable"], rig.conditions()["Ready"]) == ("False", "False")
    assert rig.conditions()["EngineAvailable"] == "True"
    assert rig.message("Progressing") == rig.message("Ready") == ""


def test_operator_polls_only_pods_with_a_sidecar() -> None:
    rig = Rig.settled(replicas=2)
    rig.world.pods["demo-extra-0"]["status"] |= {"phase": "Running", "podIP": "10.0.0.9"}
    rig.answer(GOOD, GOOD)
    rig.run()
    assert (len(rig.world.pods), rig.world.num_stats_reads) == (3, 2)
    assert rig.message("SidecarAttached") == "2 of 2 engines use their sidecars."


def test_unwanted_component_is_deleted_with_dependents_first() -> None:
    rig = Rig.settled(replicas=2)
    written = rig.change(engine={"replicas": 1})
    assert [write for write in written if "delete" in write] == [f"delete {SET}", f"delete {CONFIG}"]
    assert not {SET, CONFIG} & rig.world.objects.keys()
    assert "ExtraAvailable" not in rig.conditions()
    assert rig.conditions()["Ready"] == "True"
    rig.change(engine={"replicas": 3})
    assert {SET, CONFIG} <= rig.world.objects.keys()


@pytest.mark.parametrize("change", ["another owner", "no label", "ending"])
def test_objects_of_other_owners_are_never_deleted(change: str) -> None:
    rig = Rig.settled(replicas=2)
    metadata = rig.world.objects[CONFIG]["metadata"]
    if change == "another owner":
        metadata["ownerReferences"][0]["uid"] = "of another owner"
    elif change == "no label":
        del metadata["labels"]["app.kubernetes.io/managed-by"]
    else:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    written = rig.change(engine={"replicas": 1})
    assert f"delete {SET}" in written
    assert f"delete {CONFIG}" not in written


def test_object_recreated_after_the_observation_is_not_deleted() -> None:
    """The operator deletes only the object that it observed, by its uid."""
    rig = Rig.settled(replicas=2)
    rig.world.change(engine={"replicas": 1})
    rig.world.replaced.add(CONFIG)
    rig.run()
    assert CONFIG in rig.world.objects


def test_refused_deletion_degrades_the_cluster() -> None:
    rig = Rig.settled(replicas=2)
    rig.world.change(engine={"replicas": 1})
    rig.world.failures["delete ConfigMap"] = RefusedError("delete", "no right to it")
    rig.run()
    assert rig.message("Degraded") == f"deletion of {CONFIG}: no right to it"
    assert SET not in rig.world.objects


# -- contract of all components


@pytest.mark.parametrize("component", BOTH, ids=lambda component: component.name)
def test_component_lists_the_refs_of_all_rendered_objects(component: Any) -> None:
    rendered = [*children(component, engine=FULL_ENGINE, tiers=TIERS, router={})]
    if component.name == AUTOSCALING:  # its ConfigMap depends on samples
        assert not rendered
        return
    assert (sorted(rendered), rendered[-1]) == (sorted(component.refs(NAME)), component.refs(NAME)[-1])


def test_components_share_no_object() -> None:
    refs = [ref for component in BOTH for ref in component.refs(NAME)]
    assert (len(refs), set(kinds_of(BOTH))) == (len(set(refs)), set(kinds_of(COMPONENTS)))


def test_spec_hash_equals_that_of_earlier_operators() -> None:
    """A changed hash replaces pods: an upgrade of the operator would restart every engine."""
    assert spec_hash(parse(cluster()), STOCK_IMAGES) == "bae94452763bf7ec"
    remote = {"external": {"url": "redis://h", "authSecretRef": {"name": "auth"}}}
    engine = {"args": ["--x"], "image": "e:1", "replicas": 2, "gpu": {"count": 2}}
    engine["parallelism"] = {"tensor": 2}
    declared = parse(cluster(engine=engine, sidecar={"chunkTokens": 512}, tiers={"remote": remote}))
    assert spec_hash(declared, STOCK_IMAGES) == "f81dda7d7f056f25"


def test_chart_grants_exactly_the_rights_that_components_need() -> None:
    """The operator may delete only kinds that are optional or immutable."""
    chart = Path(__file__).resolve().parents[3] / "charts" / "lmcache-operator" / "templates"
    _, _, rules_text = (chart / "_helpers.tpl").read_text().partition('define "lmcache-operator.rules" -}}')
    rules = yaml.safe_load(rules_text.partition("{{- end }}")[0])
    rights = {
        (group, plural): rule["verbs"]
        for rule in rules
        for group in rule["apiGroups"]
        for plural in rule["resources"]
        if "patch" in rule["verbs"] and "/" not in plural and plural not in ("events", "pods")
    }
    verbs = ["get", "list", "watch", "create", "patch"]
    refs = {ref for component in COMPONENTS for ref in component.refs(NAME)}
    optional_kinds = {ref.kind for ref in refs - children(*COMPONENTS).keys()}
    assert rights == {
        (kind.group, kind.plural): [*verbs, "delete"] if kind.kind in optional_kinds else verbs
        for kind in kinds_of(COMPONENTS)
    }
    assert [rule["verbs"] for rule in rules if "secrets" in rule["resources"]] == [["create"]]
