"""Fields of the schema that reach a pod are all decided, and the operator refuses what only it can refuse."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator import hostile_specs, spec_fuzz
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.hostile_specs import (
    ADMITTED,
    ANNOTATIONS,
    FULL,
    HOSTILE_PODS,
    LABELS,
    OPERATOR,
    REFUSED,
    HostilePod,
)
from tests.harness.operator.model import MINIMAL_SPEC, cluster

OWNERS_OF_PODS = ("StatefulSet", "Deployment", "LMCacheProfile", "LMCacheCluster")


def test_every_field_of_the_schema_is_decided() -> None:
    undecided = [path for path in hostile_specs.fields() if hostile_specs.entry_of(path) is None]
    remedy = (
        "decide who keeps the author of an LMCacheCluster from reaching more by these fields, in "
        "tests/harness/operator/hostile_specs.py. A field that names a Secret also belongs in "
        "templates/policies.yaml"
    )
    assert undecided == [], remedy


def test_every_decision_is_about_a_field_of_the_schema() -> None:
    used = {hostile_specs.entry_of(path) for path in hostile_specs.fields()}
    assert used == {*REFUSED, *ADMITTED}


def test_no_field_that_names_a_secret_is_admitted() -> None:
    """Fields that end in secretRef or secretKeyRef, and those that are called like a Secret's name."""
    named = [path for path in hostile_specs.fields() if "secret" in path.lower()]
    assert len(named) > 20
    assert [path for path in named if hostile_specs.entry_of(path) in ADMITTED] == []


def value_at(spec: object, path: str) -> object:
    """The value of the field. The spec has one item in each list, and one key in each map."""
    part: Any = spec
    for name in path.replace("[]", ".[]").replace("{}", ".{}").split("."):
        part = part[0] if name == "[]" else part["key" if name == "{}" else name]
    return part


def test_generated_specs_set_their_fields() -> None:
    paths = hostile_specs.fields()
    assert len(paths) > 900
    assert [path for path in paths if value_at(hostile_specs.spec_with(path), path) is None] == []


def templates(bench: ReconciledCluster) -> dict[Ref, Any]:
    """Templates of pods, profiles, and the LMCacheCluster of prefill pods."""
    objects = bench.world.objects.items()
    return {ref: each.get("template") or each["spec"] for ref, each in objects if ref.kind in OWNERS_OF_PODS}


@pytest.mark.parametrize("seed", spec_fuzz.seeds(30))
def test_inputs_besides_the_spec_change_no_pod(seed: int) -> None:
    """Users may set labels and annotations. Those who may create pods may write the status."""
    spec = FULL if seed % 2 else MINIMAL_SPEC
    expected = ReconciledCluster()
    expected.world.resource = cluster(spec)
    expected.settle()
    bench = ReconciledCluster()
    bench.world.resource = cluster(spec)
    bench.world.resource["metadata"] |= {"labels": LABELS, "annotations": ANNOTATIONS}
    for _ in range(4):
        bench.world.resource["status"] = hostile_specs.hostile_status(seed)
        bench.world.run_stateful_sets()
        bench.run()
    assert templates(bench) == templates(expected)
    assert "attacker.example/x" not in str(bench.world.objects)


@pytest.mark.parametrize("pod", HOSTILE_PODS, ids=lambda pod: pod.field)
def test_operator_refuses_pod_templates_that_take_another_account_or_image(pod: HostilePod) -> None:
    resource = parse(cluster(engine={"podTemplate": pod.template}))
    if pod.refused_by == OPERATOR:
        with pytest.raises(InvalidSpecError, match="which the cache depends on"):
            Engine().render(resource, Context(STOCK_IMAGES))
    else:
        Engine().render(resource, Context(STOCK_IMAGES))
