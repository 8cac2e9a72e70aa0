"""The component framework: deletion of what the spec does not ask for, and the contract of all components."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import spec_hash
from lmcache_operator.components.registry import COMPONENTS, kinds_of
from lmcache_operator.errors import RefusedError
from lmcache_operator.specs.names import AUTOSCALING, STOCK_IMAGES
from tests.harness.operator.components import GOOD, ReconciledCluster
from tests.harness.operator.model import NAME, cluster
from tests.harness.operator.render import children
from tests.harness.operator.shards import ACCOUNT, LIST, SET, managed

FULL_ENGINE = {"replicas": 2, "gpu": {"deviceClassName": "gpu.nvidia.com"}, "prefill": {}}
"""An engine spec with which components render all their kinds of objects."""
TIERS = {
    "peers": {"tls": {"issuerRef": {"name": "caches"}}},
    "remote": {"managed": {"memoryPerShard": "1Gi", "tls": {"issuerRef": {"name": "caches"}}}},
}
WITHOUT_SHARDS = {"tiers": {"remote": None}}


@pytest.fixture
def rig() -> ReconciledCluster:
    """A cluster with engines and one shard."""
    return ReconciledCluster.settled(engine={"replicas": 2}, tiers=managed(1))


def test_operator_polls_only_pods_with_a_sidecar(rig: ReconciledCluster) -> None:
    rig.world.pods["demo-remote-0"]["status"] |= {"phase": "Running", "podIP": "10.0.0.9"}
    rig.answer(GOOD, GOOD)
    rig.run()
    assert (len(rig.world.pods), rig.world.num_stats_reads) == (3, 2)
    assert rig.message("SidecarAttached") == "2 of 2 engine pods use their sidecars."


def test_unwanted_component_is_deleted_with_dependents_first(rig: ReconciledCluster) -> None:
    deleted = [write for write in rig.change(**WITHOUT_SHARDS) if "delete" in write]
    assert (deleted[0], deleted[-1]) == (f"delete {SET}", f"delete {ACCOUNT}")


@pytest.mark.parametrize("change", ["another owner", "no label", "ending"])
def test_objects_of_other_owners_are_never_deleted(rig: ReconciledCluster, change: str) -> None:
    metadata = rig.world.objects[LIST]["metadata"]
    if change == "another owner":
        metadata["ownerReferences"][0]["uid"] = "of another owner"
    elif change == "no label":
        del metadata["labels"]["app.kubernetes.io/managed-by"]
    else:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    written = rig.change(**WITHOUT_SHARDS)
    assert f"delete {SET}" in written
    assert f"delete {LIST}" not in written


def test_object_recreated_after_the_observation_is_not_deleted(rig: ReconciledCluster) -> None:
    """The operator deletes only the object that it observed, by its uid."""
    rig.world.change(**WITHOUT_SHARDS)
    rig.world.replaced.add(LIST)
    rig.run()
    assert LIST in rig.world.objects


def test_refused_deletion_degrades_the_cluster(rig: ReconciledCluster) -> None:
    rig.world.change(**WITHOUT_SHARDS)
    rig.world.failures["delete ConfigMap"] = RefusedError("delete", "no right to it")
    rig.run()
    assert rig.message("Degraded") == f"deletion of {LIST}: no right to it"
    assert SET not in rig.world.objects


# -- contract of all components


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda component: component.name)
def test_component_lists_the_refs_of_all_rendered_objects(component: Any) -> None:
    rendered = [*children(component, engine=FULL_ENGINE, tiers=TIERS, router={})]
    if component.name == AUTOSCALING:  # its ConfigMap depends on samples
        assert not rendered
        return
    assert (sorted(rendered), rendered[-1]) == (sorted(component.refs(NAME)), component.refs(NAME)[-1])


def test_components_share_no_object() -> None:
    refs = [ref for component in COMPONENTS for ref in component.refs(NAME)]
    assert len(refs) == len(set(refs))


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
    optional_kinds.update(*(component.group_kinds for component in COMPONENTS))
    assert rights == {
        (kind.group, kind.plural): [*verbs, "delete"] if kind.kind in optional_kinds else verbs
        for kind in kinds_of(COMPONENTS)
    }
    assert [rule["verbs"] for rule in rules if "secrets" in rule["resources"]] == [["create"]]
