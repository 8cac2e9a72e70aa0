"""Times at which a router starts and stops to use prefill pods, and settings that no prefill pod can have."""

from typing import Any

import pytest
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.kinds import Ref

from tests.harness.operator_model import cluster
from tests.harness.operator_prefill import CHILD, ROUTER, FullRig, child, with_prefill

ENGINE = Ref("StatefulSet", "demo-engine")


def test_router_uses_prefill_pods_when_the_first_one_is_ready() -> None:
    rig = FullRig.settled(**with_prefill())
    assert not rig.uses_prefill_pods
    assert "the router uses only the other engine pods" in rig.message("PrefillAvailable")
    rig.report(0)
    rig.settle()
    assert not rig.uses_prefill_pods
    rig.report(1)
    rig.settle()
    assert rig.uses_prefill_pods
    rig.roll_out()
    rig.report(0)
    rig.settle()
    assert rig.uses_prefill_pods, "a router keeps its pools"
    assert "requests to the router fail" in rig.message("PrefillAvailable")


def test_prefill_pods_stay_until_no_router_uses_them() -> None:
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.settle()
    rig.roll_out()
    rig.settle()
    assert f"delete {CHILD}" not in rig.change(engine={"prefill": None})
    assert not rig.uses_prefill_pods
    assert rig.conditions()["Progressing"] == "True", "so that the operator looks again"
    assert rig.conditions()["PrefillAvailable"] == "True"
    rig.roll_out()
    assert f"delete {CHILD}" in rig.settle()
    assert "PrefillAvailable" not in rig.conditions()


def test_prefill_pods_are_deleted_with_their_router() -> None:
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.settle()
    assert f"delete {CHILD}" in rig.change(engine={"prefill": None}, router=None)


def test_prompts_are_not_sent_to_a_cluster_of_another_owner() -> None:
    users = cluster() | {"metadata": {"name": "demo-prefill", "uid": "1", "namespace": "team"}}
    users["status"] = {"readyReplicas": 3}
    rig = FullRig(**with_prefill())
    rig.world.objects[CHILD] = users
    rig.settle()
    assert not rig.uses_prefill_pods
    assert "delete it or rename this cluster" in rig.message("Degraded")

    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.settle()
    rig.world.objects[CHILD] = users
    rig.settle()
    assert not rig.uses_prefill_pods, "the user replaced the prefill pods"


INVALID_CHILDREN = [
    (
        {"prefill": {"args": ["--max-num-seqs=8", "--port=1"]}},
        r"^spec\.engine\.prefill\.args\[1\]: --port can't be set",
    ),
    (
        {
            "prefill": {"nodeSelector": {"gpu": "h200"}},
            "podTemplate": {"spec": {"nodeSelector": {"gpu": "l40s"}}},
        },
        r"contradicts spec\.engine\.prefill\.nodeSelector at",
    ),
    (
        {
            "prefill": {"resources": {"requests": {"cpu": 8}}},
            "podTemplate": {
                "spec": {"containers": [{"name": "engine", "resources": {"requests": {"cpu": 4}}}]}
            },
        },
        r"contradicts spec\.engine\.prefill\.resources at",
    ),
]


@pytest.mark.parametrize(("engine", "message"), INVALID_CHILDREN)
def test_settings_that_no_prefill_pod_can_have_are_refused(engine: dict[str, Any], message: str) -> None:
    changes = with_prefill()
    changes["engine"] |= engine | {"args": ["--max-model-len=32768"]}
    with pytest.raises(InvalidSpecError, match=message):
        child(changes)
    rig = FullRig.settled(**with_prefill())
    rig.report(1)
    rig.settle()
    before = rig.child["spec"], rig.world.objects[ENGINE]["spec"], rig.world.objects[ROUTER]["spec"]
    rig.change(engine=engine)
    assert rig.conditions()["Degraded"] == "True"
    assert (rig.child["spec"], rig.world.objects[ENGINE]["spec"], rig.world.objects[ROUTER]["spec"]) == before
