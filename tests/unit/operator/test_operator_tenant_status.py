"""Hits and memory of each tenant in the status, from reports that are not trusted."""

import hashlib
import json
from typing import Any

import pytest

from lmcache_operator.components.engine.features.tenants import TenantBudgets
from lmcache_operator.errors import RefusedError
from lmcache_operator.specs.kinds import Ref
from lmcache_store.tenant_names import DEFAULT_NAME, MAX_NAMED
from tests.harness.operator.components import GOOD, ReconciledCluster

USABLE = 1000


def declared(*names: str) -> dict[str, Any]:
    """A spec with these tenants."""
    return {"named": [{"name": name, "saltHash": f"{number:064x}"} for number, name in enumerate(names)]}


def report(usable_bytes: Any = USABLE, **tenants: tuple[int, int, int]) -> dict[str, Any]:
    """Answer of a sidecar with prompt tokens, hit tokens and bytes by tenant."""
    fields = enumerate(("prompt_tokens", "hit_tokens", "bytes"))
    figures = {field: {name: each[i] for name, each in tenants.items()} for i, field in fields}
    return GOOD | {"memory": {"usable_bytes": usable_bytes}, "tenants": {"tenants_problem": "", **figures}}


def hits(*, tokens: int, hit_tokens: int) -> dict[str, Any]:
    """Answer of a sidecar whose lookups are all of one tenant, which has as many bytes as hits."""
    lookups = {"lookup_tokens": tokens, "hit_tokens": {"memory": hit_tokens}}
    return report(search=(tokens, hit_tokens, hit_tokens)) | {"lookups": lookups}


class Rig(ReconciledCluster):
    """Running engine pods, whose sidecars answer with these reports."""

    def __init__(self, *answers: Any, tenants: Any = None) -> None:
        tenants = declared("search") if tenants is None else tenants
        super().__init__(engine={"replicas": max(1, len(answers))}, tenants=tenants)
        self.settle()
        self.answer(*answers)

    def declare(self, *names: str) -> None:
        """Let the spec have these tenants, and no others; without names, the spec has none."""
        self.world.change(tenants=None)
        self.world.change(**({"tenants": declared(*names)} if names else {}))

    def listed(self) -> Any:
        """Reconcile once. Returns the list in the status, or None if the status has no list."""
        self.run()
        return self.world.resource["status"].get("tenants")


def entry(name: str, hits: int | None = None, memory: int | None = None) -> dict[str, Any]:
    figures = {"hitPercent": hits, "usedMemoryPercent": memory}
    return {"name": name, **{field: figure for field, figure in figures.items() if figure is not None}}


def test_figures_are_those_of_all_pods_together() -> None:
    rig = Rig(
        report(default=(100, 10, 50), search=(1000, 900, 300)),
        report(3 * USABLE, default=(100, 20, 50), search=(3000, 300, 500)),
    )
    assert rig.listed() == [entry("default", 15, 2), entry("search", 30, 20)]


@pytest.mark.parametrize("answer", [None, GOOD, GOOD | {"tenants": {"tenants_problem": ""}}])
def test_field_appears_with_the_first_report(answer: Any) -> None:
    """Sidecars of earlier versions report no tenants."""
    rig = Rig(answer)
    assert rig.listed() is None
    rig.answer(report(default=(0, 0, 0)))
    rig.seconds += 61  # so that a silent sidecar is probed again
    assert rig.listed() is not None


def test_unknown_names_are_not_reported() -> None:
    hashed = "c0ffee" * 10
    rig = Rig(report(**{"default": (1, 0, 0), hashed: (1, 1, 1), "removed": (9, 9, 9)}))
    assert rig.listed() == [entry("default", 0, 0), entry("search", None, 0)]
    assert hashed not in json.dumps(rig.world.resource)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (report(search=(10, 2**62, 2**62)), entry("search", 100, 100)),
        (report(search=(-5, 7, -9)), entry("search", None, 0)),
        (report(search=(2**70, 7, 2**70)), entry("search", None, 0)),
        (report("much", search=(10, 5, 7)), entry("search", 50)),
        (report(search=("x", [], {})), entry("search", None, 0)),
        (GOOD | {"memory": {"usable_bytes": USABLE},
                 "tenants": {"tenants_problem": "", "bytes": {"search": 100}, "hit_tokens": [3],
                             "prompt_tokens": "x"}}, entry("search", None, 10)),
    ],
)  # fmt: skip
def test_wrong_figures_are_limited_or_ignored(answer: Any, expected: dict[str, Any]) -> None:
    rig = Rig(answer)
    (_, search) = rig.listed()
    assert search == expected


def test_report_with_many_names_is_cut() -> None:
    """A report has at most 256 KiB, which a sidecar could fill with names."""
    names = {f"n{number}": (1, 1, 1) for number in range(5000)}
    assert len(TenantBudgets().read(report(**names)).figures) == MAX_NAMED + 1


def test_all_tenants_of_the_largest_spec_are_reported() -> None:
    names = [f"t{number}" for number in range(MAX_NAMED)]
    counts = {name: (100, number, 0) for number, name in enumerate((DEFAULT_NAME, *names))}
    rig = Rig(report(**counts), tenants=declared(*names))
    assert [tenant["hitPercent"] for tenant in rig.listed()] == list(range(MAX_NAMED + 1))


def test_small_changes_write_no_status() -> None:
    rig = Rig(report(default=(100, 50, 500), search=(1000, 400, 400)))
    before = rig.listed()
    rig.answer(report(default=(100, 50, 505), search=(2000, 830, 410)))
    assert (rig.listed(), rig.world.writes) == (before, [])
    rig.answer(report(default=(100, 50, 505), search=(2000, 860, 410)))
    assert rig.listed() == [entry("default", 50, 50), entry("search", 43, 41)]


def test_small_figures_that_change_by_two_points_write_no_status() -> None:
    """Five per cent of a small figure would be less than a point."""
    rig = Rig(hits(tokens=1000, hit_tokens=40))
    before = rig.listed()
    assert before == [entry("default", None, 0), entry("search", 4, 4)]
    for near in (60, 20, 55):
        rig.answer(hits(tokens=1000, hit_tokens=near))
        assert (rig.listed(), rig.world.writes) == (before, [])
    rig.answer(hits(tokens=1000, hit_tokens=70))
    assert rig.listed() == [entry("default", None, 0), entry("search", 7, 7)]
    assert rig.world.resource["status"]["hitPercent"] == {"engine": 0, "memory": 7}


def test_cluster_without_pods_has_no_figures() -> None:
    rig = Rig(hits(tokens=1000, hit_tokens=400))
    assert rig.listed()
    rig.world.resource["spec"]["engine"]["replicas"] = 0
    rig.change()
    assert not rig.world.pods
    assert rig.world.resource["status"].keys().isdisjoint({"tenants", "hitPercent"})


def test_hits_stay_while_restarted_sidecars_have_no_prompts() -> None:
    rig = Rig(report(default=(100, 50, 500), search=(1000, 400, 400)))
    rig.listed()
    rig.answer(report(default=(0, 0, 0), search=(10, 9, 400)))
    assert rig.listed() == [entry("default", 50, 0), entry("search", 90, 40)]


def test_figures_stay_while_no_sidecar_answers() -> None:
    rig = Rig(report(default=(100, 50, 500), search=(1000, 400, 400)))
    before = rig.listed()
    rig.restart_operator()
    rig.answer(None)
    assert rig.listed() == before
    rig.declare("search", "new")
    rig.settle()
    assert rig.listed() == [*before, entry("new")], "the names are those of the spec"


def test_names_that_differ_in_a_figure_are_different() -> None:
    rig = Rig(report(t100=(100, 50, 500)), tenants=declared("t100"))
    rig.listed()
    rig.declare("t101")
    rig.answer(report(t101=(100, 50, 500)))
    assert rig.listed() == [entry("default", None, 0), entry("t101", 50, 50)]


def test_entries_do_not_move() -> None:
    """The API server keeps the order of such a list, so that a new order would be written again and again."""
    rig = Rig(report(a=(100, 50, 500), b=(100, 10, 100)), tenants=declared("a", "b"))
    before = rig.listed()
    rig.declare("c", "b", "a")
    assert rig.listed() == [*before, entry("c", None, 0)]


def test_field_disappears_with_the_tenants() -> None:
    rig = Rig(report(default=(100, 50, 500)))
    assert rig.listed()
    rig.declare()
    assert rig.listed() is None


def test_invalid_spec_keeps_the_former_list() -> None:
    rig = Rig(report(default=(100, 50, 500), search=(100, 10, 0)))
    before = rig.listed()
    rig.world.change(tenants={"default": {"memoryPercent": 1000}})
    rig.answer(report(default=(100, 90, 500)))
    assert (rig.listed(), rig.conditions()["Degraded"]) == (before, "True")


# -- the condition TenantsKnown while the kubelet updates the file with the tenants in running pods


CONFIG = Ref("ConfigMap", "demo-sidecar")
SETTLED_SECONDS = 800
"""Without a change, the next reconciliation of a settled cluster is later than this."""


class FollowedFile(ReconciledCluster):
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
    rig = FollowedFile()
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
    assert (rig.known, rig.conditions()["Degraded"]) == (IN_USE, "False")


def test_pending_file_is_probed_again_soon_and_written_to_the_status_once() -> None:
    """No watch reports that a sidecar uses a new file, and no wait may become a hot loop."""
    rig = FollowedFile()
    rig.change_share(30)
    waits, writes = [], []
    for _ in range(8):
        waits.append(rig.reconcile())
        writes += rig.world.writes
    assert (rig.known, writes) == (PENDING, [])
    assert all(2 < wait < 100 for wait in waits)
    assert waits[-1] > 30, "the waits grow"


def test_changed_back_file_is_in_use_at_once() -> None:
    rig = FollowedFile()
    rig.change_share(30)
    rig.change_share(50)
    assert rig.known == IN_USE


def test_sidecar_of_an_earlier_version_needs_no_further_probes() -> None:
    rig = FollowedFile()
    rig.report(0, tenants_problem="")
    assert rig.reconcile() > 0
    assert rig.known == ("Unknown", "NotReported")
    assert rig.reconcile() > SETTLED_SECONDS
    assert rig.world.writes == []


def test_restarted_operator_trusts_no_condition_of_an_earlier_spec() -> None:
    rig = FollowedFile()
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
    rig = FollowedFile()
    rig.report(0, tenants_problem=problem, tenants_digest="0" * 64)
    rig.change_share(1000)
    assert rig.conditions()["Degraded"] == "True"
    assert rig.known == (("False", "TenantsInvalid") if problem else IN_USE)
    (known,) = [c for c in rig.world.resource["status"]["conditions"] if c["type"] == "TenantsKnown"]
    if not problem:
        assert known["observedGeneration"] == rig.world.resource["metadata"]["generation"] - 1


def test_file_that_could_not_be_written_is_pending() -> None:
    rig = FollowedFile()
    rig.world.failures["apply ConfigMap"] = RefusedError("apply ConfigMap", "no")
    rig.change_share(30)
    assert (rig.conditions()["Degraded"], rig.known) == ("True", PENDING)
