"""The screen of ``kubectl lmcache status``."""

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.commands import printing
from lmcache_cli.commands.gather import Gathered, PodFigures
from lmcache_cli.commands.status import screen, status_of
from tests.harness.commands.command_world import GiB, condition, figures, gathered, pod, stats
from tests.unit.explain.test_merge import ANY


def text(world: Gathered, *, colors: bool = False, width: int = 100, **options: Any) -> str:
    return "\n".join(screen(status_of(world), printing.Style(colors), width, **options))


def test_screen_shows_pods_tiers_and_next_steps() -> None:
    shown = text(gathered(figures(0), figures(1)))
    assert shown.splitlines()[0] == "team/demo  Ready  2026-01-01T00:00:00+00:00"
    assert "demo-engine-0  yes    2h  1Gi of 4Gi     60 %  in use" in shown
    assert "memory tier              2Gi   8Gi   50 %  ████████████  ok" in shown
    assert "2,000 tokens of prompts since the sidecars started." in shown
    assert "9 % of all prompt tokens were stored before, were evicted" in shown
    assert "kubectl lmcache explain -n team demo" in shown
    assert "doctor" not in shown


def test_remote_tier_is_shared_and_other_tiers_add_up() -> None:
    tiers = {"disk": {"used_bytes": GiB}, "peers": {"is_reachable": True, "servers": []}}
    status = status_of(gathered(figures(0, **tiers), figures(1, **tiers)))
    used = {tier["name"]: tier["usedBytes"] for tier in status["tiers"]}
    assert used == {
        "engine": None, "memory": 2 * GiB, "disk": 2 * GiB, "peers": None, "remote": 10 * GiB
    }  # fmt: skip
    assert sum(tier["hitTokens"] for tier in status["tiers"]) + 800 == status["promptTokens"] == 2000


def test_spec_gives_the_sizes_of_lower_tiers() -> None:
    tiers = {
        "memory": {"size": "4Gi"},
        "disk": {"size": "100Gi"},
        "remote": {"managed": {"shards": 3, "memoryPerShard": "8Gi"}},
    }
    world = gathered(figures(0, disk={"used_bytes": 1}), figures(1, disk={"used_bytes": 1}), tiers=tiers)
    sizes = {tier["name"]: tier["sizeBytes"] for tier in status_of(world)["tiers"]}
    assert sizes == {"engine": 16 * GiB, "memory": 8 * GiB, "disk": 200 * GiB, "remote": 24 * GiB}


def test_problems_are_first_and_lead_to_doctor() -> None:
    silent = PodFigures(pod(7, is_ready=False), problem="no answer within 3 s")
    off = {"is_reachable": False, "off_reason": "connection refused"}
    world = gathered(
        figures(0), figures(1, remote=off), silent,
        conditions=[
            condition("Ready", "False", "EnginesNotReady", "1 of 3 engine pods are ready"),
            condition("Degraded", "True", "RemoteTierUnreachable", "a reason"),
            condition("Progressing", "False"),
            condition("AutoscalingActive", "Unknown"),
        ],
    )  # fmt: skip
    shown = text(world)
    lines = shown.splitlines()
    assert lines[0].startswith("team/demo  Not ready, Degraded")
    assert lines[3].startswith("demo-engine-7  no")
    assert "no answer within 3 s" in lines[3]
    assert "1 of 2 pods: connection refused" in shown
    assert "Ready is False (EnginesNotReady): 1 of 3 engine pods are ready" in shown
    assert "Degraded is True (RemoteTierUnreachable): a reason" in shown
    assert "Progressing" not in shown
    assert "AutoscalingActive" not in shown
    assert "kubectl lmcache doctor -n team demo" in shown


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"is_ready": False, "not_ready_reason": "no \x1b[31mspace"}, "no [31mspace"),
        ({"is_ready": False}, "not ready"),
        ({"num_clients": {"attached": 0}}, "no engine uses the cache"),
    ],
)
def test_problem_of_a_pod_is_named(changes: dict[str, Any], problem: str) -> None:
    assert status_of(gathered(figures(0, **changes)))["pods"][0]["problem"] == problem


def test_a_thousand_pods_fit_on_a_screen() -> None:
    silent = PodFigures(pod(999), problem="no answer")
    world = gathered(*(figures(number) for number in range(999)), silent)
    shown = text(world)
    assert len(shown.splitlines()) < 45
    assert shown.splitlines()[3].startswith("demo-engine-999")
    assert "and 988 more pods, 0 of them with a problem: --all-pods lists all" in shown
    assert len(text(world, all_pods=True).splitlines()) > 1000


def test_cluster_without_pods_requests_or_a_status_says_so() -> None:
    world = gathered()
    assert "It has no pods." in text(world)
    del world.cluster["status"]
    assert "It has no pods." in text(world)
    unreported = "- The operator has not reported on this cluster. Find the reason: kubectl lmcache doctor"
    assert unreported in text(world)
    idle = gathered(figures(0, causes=stats()["causes"] | {"prompt_tokens": 0, "cause_tokens": {}}))
    assert "No prompt was counted yet: send a request to the engines." in text(idle)


def test_what_could_not_be_read_is_the_first_next_step() -> None:
    shown = text(gathered(problems=("the pods cannot be listed: forbidden",)))
    assert "- the pods cannot be listed: forbidden" in shown
    assert "send a request" not in shown


def test_savings_are_shown_at_the_prices_of_the_spec() -> None:
    saved = {
        "saved_prefill_seconds": {"memory": 7200.0},
        "saved_gpu_seconds": 7200.0,
        "tier_byte_seconds": {"memory": 10.0 * GiB * 3600},
        "first_tokens": {"1024": {"tier": {"0.25": 10}, "none": {"2": 10}}},
    }
    prices = {"gpuHour": "3.00", "memoryGiBHour": "0.10"}
    world = gathered(figures(benefit=saved), autoscaling={"prices": prices})
    assert status_of(world)["savings"]["netUSD"] == pytest.approx(5.0)
    shown = text(world)
    assert "GPU time saved  2.00 h  +6.00" in shown
    assert "tiers                   -1.00" in shown
    assert "net                     +5.00" in shown
    assert "A hit saves 1.6s to the first token at the median, and 1.73s at p95." in shown
    assert "SAVINGS" not in text(gathered(figures()))


def test_colors_change_no_column() -> None:
    world = gathered(figures(0), PodFigures(pod(1, is_ready=False), problem="no answer"))
    colored = text(world, colors=True)
    assert "\x1b[32m" in colored
    assert re.sub("\x1b\\[[0-9;]*m", "", colored) == text(world)


def test_documents_are_the_same_in_json_and_yaml() -> None:
    status = status_of(gathered(figures()))
    assert json.loads(printing.document(status, "json")) == yaml.safe_load(printing.document(status, "yaml"))
    assert list(status) == [
        "version", "namespace", "name", "time", "pods", "tiers", "promptTokens", "causeTokens", "conditions",
        "savings", "findings", "problems",
    ]  # fmt: skip


REPORT = st.dictionaries(
    st.sampled_from(
        ["is_ready", "num_clients", "memory", "disk", "remote", "lookups", "causes", "uptime_seconds"]
    ),
    ANY,
)


@given(st.lists(REPORT, max_size=3))
def test_any_report_of_a_pod_can_be_shown(reports: list[Any]) -> None:
    """Sidecars run in users' pods."""
    world = gathered(*(PodFigures(pod(number), report) for number, report in enumerate(reports)))
    assert "\x1b" not in text(world)
