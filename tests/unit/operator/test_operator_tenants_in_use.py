"""The condition TenantsKnown while the kubelet updates the file with the tenants in running pods."""

import hashlib
from typing import Any

import pytest
from lmcache_operator.errors import RefusedError
from lmcache_operator.specs.kinds import Ref

from tests.harness.operator_components import GOOD, ReconciledCluster

CONFIG = Ref("ConfigMap", "demo-sidecar")
SETTLED_SECONDS = 800
"""Without a change, the next reconciliation of a settled cluster is later than this."""


class Rig(ReconciledCluster):
    """Two engine pods, whose sidecars use the file of their ConfigMap when the test says so."""

    def __init__(self) -> None:
        super().__init__(engine={"replicas": 2}, tenants={"default": {"memoryPercent": 50}})
        self.settle()
        self.use_file(0, 1)
        self.reconcile()

    def use_file(self, *numbers: int) -> None:
        """Let the sidecars of these pods use the present file, and answer."""
        text = self.world.objects[CONFIG]["data"]["tenants.yaml"]
        for number in numbers:
            digest = hashlib.sha256(text.encode()).hexdigest()
            self.report(number, tenants_problem="", tenants_digest=digest)

    def report(self, number: int, **tenants: Any) -> None:
        """Let one sidecar answer with this about its tenants."""
        answers = [self.world.stats.get(f"10.0.0.{other}") for other in range(2)]
        answers[number] = GOOD | {"tenants": tenants}
        self.answer(*answers)

    def change_share(self, percent: int) -> float | None:
        """Change the share of other tenants, and reconcile once."""
        self.world.change(tenants={"default": {"memoryPercent": percent}})
        return self.reconcile()

    @property
    def known(self) -> tuple[str, str]:
        return self.condition("TenantsKnown")


IN_USE, PENDING = ("True", "TenantsInUse"), ("False", "TenantsPending")


def test_condition_waits_for_each_sidecar_to_use_the_new_file() -> None:
    rig = Rig()
    assert rig.known == IN_USE
    assert rig.reconcile() > SETTLED_SECONDS
    rig.change_share(30)
    assert rig.known == PENDING, "already in the reconciliation that writes the file"
    rig.use_file(0)
    rig.reconcile()
    assert rig.known == PENDING
    message = "1 of 2 sidecars do not use the declared tenants yet. First: pod demo-engine-1. "
    assert rig.message("TenantsKnown").startswith(message)
    rig.use_file(1)
    assert rig.reconcile() > SETTLED_SECONDS
    assert rig.known == IN_USE
    assert rig.conditions()["Degraded"] == "False"


def test_pending_file_is_probed_again_soon_and_written_to_the_status_once() -> None:
    """No watch reports that a sidecar uses a new file, and no wait may become a hot loop."""
    rig = Rig()
    rig.change_share(30)
    waits, writes = [], []
    for _ in range(8):
        waits.append(rig.reconcile())
        writes += rig.world.writes
    assert rig.known == PENDING
    assert writes == []
    assert all(2 < wait < 100 for wait in waits)
    assert waits[-1] > 30, "the waits grow"


def test_changed_back_file_is_in_use_at_once() -> None:
    rig = Rig()
    rig.change_share(30)
    rig.change_share(50)
    assert rig.known == IN_USE


def test_sidecar_of_an_earlier_version_needs_no_further_probes() -> None:
    rig = Rig()
    rig.report(0, tenants_problem="")
    assert rig.reconcile() > 0
    assert rig.known == ("Unknown", "NotReported")
    assert rig.reconcile() > SETTLED_SECONDS
    assert rig.world.writes == []


def test_one_missed_answer_does_not_change_the_condition() -> None:
    rig = Rig()
    rig.world.stats.clear()
    rig.reconcile()
    assert rig.known == IN_USE


def test_restarted_operator_trusts_no_condition_of_an_earlier_spec() -> None:
    rig = Rig()
    rig.restart_operator()
    del rig.world.stats["10.0.0.1"]
    rig.reconcile()
    assert rig.known == IN_USE, "one missed answer says nothing about the same file"
    rig.restart_operator()
    rig.world.stats.clear()
    assert rig.change_share(30) < 100, "no watch reports that the sidecars answer"
    assert rig.known == ("Unknown", "NoAnswer")
    rig.use_file(0, 1)
    rig.seconds += 61  # so that silent sidecars are probed again
    rig.reconcile()
    assert rig.known == IN_USE


@pytest.mark.parametrize("problem", ["", "/x can't be read"])
def test_invalid_spec_keeps_the_former_condition_but_reports_problems(problem: str) -> None:
    rig = Rig()
    rig.report(0, tenants_problem=problem, tenants_digest="0" * 64)
    rig.change_share(1000)
    assert rig.conditions()["Ready"] == "False"
    assert rig.known == (("False", "TenantsInvalid") if problem else IN_USE)
    (known,) = [c for c in rig.world.resource["status"]["conditions"] if c["type"] == "TenantsKnown"]
    if not problem:
        assert known["observedGeneration"] == rig.world.resource["metadata"]["generation"] - 1


def test_file_that_could_not_be_written_is_pending() -> None:
    rig = Rig()
    rig.world.failures["apply ConfigMap"] = RefusedError("apply ConfigMap", "no")
    rig.change_share(30)
    assert rig.conditions()["Ready"] == "False"
    assert rig.known == PENDING
