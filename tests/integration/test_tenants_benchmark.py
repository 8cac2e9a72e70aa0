"""A small run of the benchmark of two tenants: real rows of both tenants move, and all are counted."""

import pytest

from benchmarks import tenants
from benchmarks.tenants import BOTH, FLOOD, LOAD, QUIET, STORE, Sizes
from testing.deadlines import CALLS

DEADLINES = CALLS

pytestmark = pytest.mark.rotating

SIZES = Sizes(
    row_bytes=256 << 10,
    arena=64,
    measured=12,
    ignored=2,
    request=2,
    stored=48,
    in_flight={(STORE, QUIET): 2, (STORE, FLOOD): 8, (LOAD, QUIET): 4, (LOAD, FLOOD): 8},
    rounds=2,
    warm_up=0,
)


@pytest.mark.parametrize(
    ("name", "start"), [("disk", tenants.disk_sidecar), ("remote", tenants.redis_sidecar)]
)
def test_both_tenants_move_rows_in_each_phase(name, start):
    with start(SIZES) as (sidecar, contains):
        measured = tenants.measure(sidecar, contains, SIZES)
        stats = sidecar.stats()
    for phases in measured.values():
        assert [len(phases[way]) for way in (QUIET, FLOOD, BOTH)] == [SIZES.rounds] * 3
        assert all(phase.num_rows >= SIZES.measured for way in phases.values() for phase in way)
        assert all(phase.num_flood_rows for phase in phases[BOTH])
        assert not any(phase.num_flood_rows for phase in (*phases[QUIET], *phases[FLOOD]))
    moved = {
        operation: sum(phase.num_rows + phase.num_flood_rows for way in phases.values() for phase in way)
        for operation, phases in measured.items()
    }
    tier = stats[name]
    assert tier["promoted"] >= moved[LOAD]
    assert tier["written"] >= 2 * SIZES.stored + moved[STORE]
    assert not stats["num_unwritten_rows"]
    assert all(stats["tenants"]["rows"][tenant] > 0 for tenant in (QUIET, FLOOD))
