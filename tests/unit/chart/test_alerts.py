"""Each alert of the chart fires, does not fire too early or for healthy series, and resolves: by promtool."""

import pytest

from tests.harness.alert_rules import ALERTS, Case, check

POD = 'namespace="ns", lmcache_io_cluster="c", pod="c-0"'
OTHER_POD = POD.replace("c-0", "c-1")
POD_LABELS = {"namespace": "ns", "lmcache_io_cluster": "c", "pod": "c-0"}
CLUSTER_LABELS = {"namespace": "ns", "name": "c"}
DISK_LABELS = {**POD_LABELS, "tier": "disk"}
LEADING, FAILURES = "lmcache_operator_leading", "lmcache_operator_reconcile_failures_total"
READY = 'lmcache_operator_cluster_condition{condition="Ready", namespace="ns", name="c"'
PROGRESSING, DEGRADED = READY.replace("Ready", "Progressing"), READY.replace("Ready", "Degraded")
DISK = 'tier="disk"'
ALWAYS_1, ALWAYS_0 = "1x600", "0x600"


def operations(pod: str, **values: str) -> dict[str, str]:
    """Series of the operations of a pod's disk tier. Those without values stay 0."""
    kinds = ("failures", "hits", "misses", "stored", "touched")
    return {f"lmcache_tier_{kind}_total{{{pod}, {DISK}}}": values.get(kind, ALWAYS_0) for kind in kinds}


CASES = {
    "LMCacheOperatorDown": Case(
        {LEADING + '{pod="leader"}': "1x20 0x30 1x30", LEADING + '{pod="standby"}': ALWAYS_0},
        {}, quiet=[10, 25], fires=[35, 50], resolved=[60],
    ),
    "LMCacheOperatorFailing": Case(
        {FAILURES + '{pod="leader"}': "0x10 1+1x60 61x120", FAILURES + '{pod="standby"}': ALWAYS_0},
        {"pod": "leader"}, quiet=[10, 35], fires=[45, 80], resolved=[100],
    ),
    "LMCacheClusterNotReady": Case(
        {
            # Another operator leads from minute 60 on. The alert's time continues.
            READY + ', pod="a"}': "1x10 0x48 _x200", READY + ', pod="b"}': "_x60 0x60 1x60",
            READY.replace('"c"', '"healthy"') + ', pod="a"}': ALWAYS_1,
        },
        CLUSTER_LABELS, quiet=[9, 95], fires=[105, 120], resolved=[135],
    ),
    "LMCacheClusterDegraded": Case(
        {  # another operator leads from minute 20 on
            DEGRADED + ', pod="a"}': "0x10 1x8 _x200", DEGRADED + ', pod="b"}': "_x20 1x30 0x60",
            DEGRADED.replace('"c"', '"healthy"') + ', pod="a"}': ALWAYS_0,
        },
        CLUSTER_LABELS, quiet=[5, 20], fires=[30, 50], resolved=[65],
    ),
    "LMCacheSidecarNotReady": Case(
        {f"lmcache_ready{{{POD}}}": "1x10 0x40 1x60", f"lmcache_ready{{{OTHER_POD}}}": ALWAYS_1},
        POD_LABELS, quiet=[5, 18], fires=[25, 50], resolved=[52],
    ),
    "LMCacheEngineWithoutCache": Case(
        {
            f"lmcache_ready{{{POD}}}": ALWAYS_1, f"lmcache_ready{{{OTHER_POD}}}": ALWAYS_1,
            f'lmcache_clients{{{POD}, state="attached"}}': "2x10 0x60 2x60",
            f'lmcache_clients{{{POD}, state="quarantined"}}': "0x10 2x60 0x60",
            f'lmcache_clients{{{OTHER_POD}, state="attached"}}': ALWAYS_1,
        },
        POD_LABELS, quiet=[5, 35], fires=[45, 70], resolved=[72],
    ),
    "LMCacheTierUnreachable": Case(
        {
            f"lmcache_tier_reachable{{{POD}, {DISK}}}": "1x10 0x40 1x60",
            f'lmcache_tier_reachable{{{POD}, tier="remote"}}': ALWAYS_1,
        },
        DISK_LABELS, quiet=[5, 18], fires=[25, 50], resolved=[52],
    ),
    "LMCacheMemoryTierTooSmall": Case(
        {  # 2 rows a second, and half a row a second
            f"lmcache_memory_tier_refused_total{{{POD}}}": "0x10 0+120x60 7200x120",
            f"lmcache_memory_tier_refused_total{{{OTHER_POD}}}": "0+30x200",
        },
        POD_LABELS, quiet=[12, 40], fires=[50, 70], resolved=[85],
    ),
    "LMCacheTierFailing": Case(
        {
            # Half of all operations fail for an hour.
            **operations(POD, failures="0x60 0+100x60 6000x400", hits="0+80x600", misses="0+10x600",
                         stored="0+10x600"),
            # Within the budget: 0.5 % fail all the time, and one minute of failures.
            **operations(OTHER_POD, failures="0x60 50x540", hits="0+100x600"),
        },
        DISK_LABELS, quiet=[30, 62], fires=[80, 120], resolved=[155],
    ),
    "LMCacheTierTooSlow": Case(
        {
            # One row in ten is lost for nine hours: slowly, but six times the budget.
            f'lmcache_tier_writes_skipped_total{{{POD}, {DISK}, reason="dropped"}}': "0x60 0+10x540 5400x120",
            f"lmcache_tier_written_total{{{POD}, {DISK}}}": "0+90x720",
            # A refused row is written later, and does not count.
            f'lmcache_tier_writes_skipped_total{{{OTHER_POD}, {DISK}, reason="refused"}}': "0+50x720",
            f"lmcache_tier_written_total{{{OTHER_POD}, {DISK}}}": "0+90x720",
        },
        DISK_LABELS, quiet=[30, 70], fires=[420, 600], resolved=[650],
    ),
}  # fmt: skip


def test_every_alert_has_a_case():
    assert CASES.keys() == ALERTS.keys()
    assert all(case.quiet and case.fires and case.resolved for case in CASES.values())


@pytest.mark.parametrize("name", CASES)
def test_alert_fires_and_resolves_in_time(tmp_path, name):
    assert check(tmp_path, name, CASES[name]) == ""


def test_change_that_does_not_end_within_six_hours_needs_attention(tmp_path):
    series = {
        PROGRESSING + ', pod="a"}': "0x10 1x100 _x400",
        PROGRESSING + ', pod="b"}': "_x110 1x300 0x60",
        PROGRESSING.replace('"c"', '"healthy"') + ', pod="a"}': "1x300 0x200",
    }
    case = Case(series, CLUSTER_LABELS, quiet=[20, 300, 365], fires=[390, 410], resolved=[425])
    assert check(tmp_path, "LMCacheClusterDegraded", case) == ""


def test_namespace_that_the_operator_may_not_read_is_a_failure(tmp_path):
    refused = 'lmcache_operator_refused_reads{{namespace="{}"}}'.format
    series = {refused("ns"): "0x10 13x40 1x20 0x60", refused("healthy"): ALWAYS_0}
    case = Case(series, {"namespace": "ns"}, quiet=[9, 39], fires=[43, 70], resolved=[73])
    assert check(tmp_path, "LMCacheOperatorFailing", case) == ""


def test_wrong_expectation_is_noticed(tmp_path):
    """The harness would be useless if promtool accepted anything."""
    case = CASES["LMCacheSidecarNotReady"]
    early = Case(case.series, case.labels, quiet=[], fires=case.quiet, resolved=[])
    assert "FAILED" in check(tmp_path, "LMCacheSidecarNotReady", early)
