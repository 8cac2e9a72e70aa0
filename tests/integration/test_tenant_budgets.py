"""Budgets of tenants in a real sidecar: a tenant that floods the cache, and one with a guaranteed share."""

import contextlib
import itertools
from pathlib import Path

from lmcache_sidecar.files.tenants import MAX_NAMESPACES
from lmcache_store import keys
from testing.processes import SidecarProcess
from testing.workloads.replay import Engine
from testing.workloads.requests import chat

ROW_BYTES, NAMESPACE = 32 << 10, bytes(32)
SHARE_PERCENT = 60
FLOOD_ROWS = 12


def tenants_file(path: Path, **budget: int) -> str:
    limits = ", ".join(f"{key}: {value}" for key, value in budget.items())
    path.write_text(f"named: [{{name: quiet, saltHash: {keys.salt_hash('quiet').hex()}, {limits}}}]\n")
    return str(path)


def engine(sidecar: SidecarProcess, salt: str, namespace: bytes = NAMESPACE) -> contextlib.closing[Engine]:
    return contextlib.closing(Engine(sidecar, namespace, ROW_BYTES, tenant=keys.tenant(salt, namespace)))


def hit_ratio(sidecar: SidecarProcess, *, is_flooded: bool) -> float:
    """Replay the quiet tenant's requests; before each, another tenant may store rows that nobody reads."""
    flood = itertools.count(1 << 40)
    with contextlib.ExitStack() as stack:
        quiet, flooding = (stack.enter_context(engine(sidecar, salt)) for salt in ("quiet", "flooding"))
        num_hits = num_rows = 0
        for number, request in enumerate(chat(0.2, 0.1, scale=1, systems=3, first=3).requests):
            if is_flooded:
                flooding.serve(f"flood-{number}", tuple(itertools.islice(flood, FLOOD_ROWS)))
            num_hits += quiet.serve(f"quiet-{number}", request.keys)[0]
            num_rows += len(request.keys)
            sidecar.settled()  # rows are evicted only when they have checksums
    return num_hits / num_rows


def test_flood_of_another_tenant_costs_a_guaranteed_tenant_one_point_of_hits_at_most(tmp_path):
    alone_file = tenants_file(tmp_path / "alone", memoryPercent=SHARE_PERCENT)
    with SidecarProcess(memory_size="8Mi", tenants_file=alone_file) as sidecar:
        alone = hit_ratio(sidecar, is_flooded=False)
    with SidecarProcess(memory_size="8Mi") as sidecar:
        unprotected = hit_ratio(sidecar, is_flooded=True)
    shared_file = tenants_file(tmp_path / "shared", minMemoryPercent=SHARE_PERCENT)
    with SidecarProcess(memory_size="8Mi", tenants_file=shared_file) as sidecar:
        protected = hit_ratio(sidecar, is_flooded=True)
        stats = sidecar.stats()["tenants"]
    assert 0.2 < alone < 0.95
    assert unprotected < alone - 0.05, "the flood is harmless, so the test shows nothing"
    assert protected >= alone - 0.01
    assert stats["tenants_problem"] == ""
    assert set(stats["bytes"]) == {"default", "quiet"}
    assert stats["evictions"]["default"] > 0
    assert stats["hit_tokens"]["quiet"] > 0


def test_guarantee_survives_a_restart_of_the_sidecar(tmp_path):
    rows, flood_rows = tuple(range(20)), tuple(range(20, 40))
    file = tenants_file(tmp_path / "tenants", minMemoryPercent=SHARE_PERCENT)
    with SidecarProcess(memory_size="8Mi", tenants_file=file) as sidecar:
        with engine(sidecar, "quiet") as quiet, engine(sidecar, "flooding") as flooding:
            quiet.serve("before", rows)
            flooding.serve("before", flood_rows)
            sidecar.settled()
        sidecar.restart()
        with engine(sidecar, "quiet") as quiet, engine(sidecar, "flooding") as flooding:
            present = {"default": len(flood_rows), "quiet": len(rows)}
            sidecar.wait_until(lambda stats: stats["tenants"]["rows"] == present)  # once engines attach
            sidecar.wait_until(lambda stats: not stats["num_previous_clients"])
            for number in range(10, 20):
                flooding.serve(f"flood-{number}", tuple(range(100 * number, 100 * number + 100)))
                sidecar.settled()
            assert sum(quiet.serve("after", rows)) == len(rows)
            assert sum(flooding.serve("after", flood_rows)) < len(flood_rows), (
                "the flood is harmless, so the test shows nothing"
            )


def test_sidecar_follows_the_file_and_continues_after_a_mistake(tmp_path):
    path = tmp_path / "tenants"
    file = tenants_file(path, memoryPercent=50)
    with SidecarProcess(memory_size="8Mi", tenants_file=file) as sidecar, engine(sidecar, "quiet") as quiet:
        assert quiet.serve("first", tuple(range(20))) == (0, 0)
        path.write_text("named: [{name: quiet}]")
        problem = sidecar.wait_until(lambda stats: stats["tenants"]["tenants_problem"])
        assert "set either saltHash or saltFile" in str(problem)
        assert sidecar.stats()["tenants"]["rows"] == {"default": 0, "quiet": 20}
        tenants_file(path, memoryPercent=1)
        sidecar.wait_until(lambda stats: not stats["tenants"]["tenants_problem"])
        sidecar.settled()
        quiet.serve("second", tuple(range(100, 120)))
        sidecar.wait_until(lambda stats: stats["tenants"]["rows"]["quiet"] <= 2)
        assert quiet.serve("third", tuple(range(20))) == (0, 0)


def test_budgets_apply_to_namespaces_that_attach_later_and_stay_for_attached_ones(tmp_path):
    file = tenants_file(tmp_path / "tenants", memoryPercent=50)
    with SidecarProcess(memory_size="8Mi", tenants_file=file) as sidecar, contextlib.ExitStack() as stack:

        def attach(number: int, salt: str) -> Engine:
            return stack.enter_context(engine(sidecar, salt, number.to_bytes(32, "big")))

        first, later = attach(0, "quiet"), attach(1, "quiet")
        for attached in (first, later):
            attached.serve("before", tuple(range(5)))
        assert sidecar.stats()["tenants"]["rows"] == {"default": 0, "quiet": 10}
        for number in range(2, MAX_NAMESPACES + 2):  # engines that restart, each with a namespace of its own
            restarted = attach(number, "other")
            restarted.serve("once", (0,))
            restarted.close()
        first.serve("after", tuple(range(100, 103)))
        assert sidecar.stats()["tenants"]["rows"] == {"default": MAX_NAMESPACES, "quiet": 13}
