"""The screen of ``kubectl lmcache status``."""

import itertools
import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lmcache_cli.commands import printing
from lmcache_cli.commands.gather import Gathered, PodFigures
from lmcache_cli.commands.savings import price_of_token
from lmcache_cli.commands.status import state_of, status_of
from lmcache_cli.commands.status_screen import screen
from tests.harness.commands.command_world import (
    GiB,
    condition,
    figures,
    gathered,
    pod,
    stats,
    time_before_now,
)
from tests.harness.fences import difference, output
from tests.unit.explain.test_merge import ANY


def text(world: Gathered, *, colors: bool = False, width: int = 100, **options: Any) -> str:
    return "\n".join(screen(status_of(world), printing.Style(colors), width, **options))


def table(shown: str, first: str) -> list[str]:
    """Return the lines of a part, up to the next empty line."""
    lines = shown.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(first))
    return [*itertools.takewhile(bool, lines[begin:])]


def broken(number: int = 7, *, waiting: str = "", **status: Any) -> dict[str, Any]:
    """Return a pod that is not ready, whose engine waits for this reason."""
    shown = pod(number, is_ready=False)
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    container = {"name": "engine", "state": state, "ready": False, "started": False}
    shown["status"] |= {"containerStatuses": [container]} | status
    return shown


def test_screen_shows_pods_tiers_and_next_steps() -> None:
    shown = text(gathered(figures(0), figures(1)))
    assert shown.splitlines()[0] == "team/demo  Ready  2026-01-01T00:00:00+00:00"
    assert "demo-engine-0  yes    2h  1Gi of 4Gi         50 %       10 %  in use" in shown
    assert "memory tier              2Gi   8Gi   50 %  ████████████  ok" in shown
    assert "2,000 tokens of prompts since the sidecars started." in shown
    assert "9 % of all prompt tokens were stored before, were evicted" in shown
    assert "kubectl lmcache explain -n team demo" in shown
    assert "doctor" not in shown
    assert "kubectl lmcache explain --context=prod -n team demo" in text(
        gathered(figures()), flags=" --context=prod"
    )


def test_get_started_shows_the_screen_after_one_hit() -> None:
    """Qwen3 0.6B has 112 KiB of KV per token. Eight chunks of the prompt were computed once and hit once."""
    tokens = {"prompt_tokens": 4502, "cause_tokens": {"memory": 2048, "new": 2048, "tail": 406}}
    causes = stats()["causes"] | tokens
    memory = {"size_bytes": 2 * GiB, "used_bytes": 8 * 256 * (112 << 10)}
    pod_figures = figures(memory=memory, remote=None, causes=causes, lookups={"engine_kv_bytes": GiB})
    shown = text(gathered(pod_figures, tiers={"memory": {"size": "2Gi"}}))
    expected = output("get-started/cluster.md", "lmcache status")
    for name, here in (("default/", "team/"), ("qwen3-cpu", "demo")):
        expected = expected.replace(name, here)
    assert not difference(expected, shown)
    assert "224Mi of 2Gi" in expected
    assert "224Mi of 2Gi" in shown


def test_remote_tier_is_shared_and_other_tiers_add_up() -> None:
    tiers = {"disk": {"used_bytes": GiB}, "peers": {"is_reachable": True, "servers": []}}
    status = status_of(gathered(figures(0, **tiers), figures(1, **tiers)))
    used = {tier["name"]: tier["usedBytes"] for tier in status["tiers"]}
    assert used == {
        "engine": None, "memory": 2 * GiB, "disk": 2 * GiB, "peers": None, "remote": 10 * GiB
    }  # fmt: skip
    assert sum(tier["hitTokens"] for tier in status["tiers"]) + 800 == status["promptTokens"] == 2000


def test_documents_at_another_position_are_a_source_of_tokens() -> None:
    tokens = {"engine": 100, "memory": 500, "blended": 300, "recomputed": 60, "tail": 40}
    causes = stats()["causes"] | {"cause_tokens": tokens}
    collected = gathered(figures(0, causes=causes))
    *tiers, source = status_of(collected)["tiers"]
    assert all(tier["name"] != "blended" for tier in tiers)
    assert source == {
        "name": "blended", "sizeBytes": None, "usedBytes": None, "hitTokens": 300, "problem": ""
    }  # fmt: skip
    (line,) = (line for line in text(collected).splitlines() if line.startswith("documents at"))
    assert line.split()[4:7] == ["-", "-", "30"], "its share of 1,000 tokens"


def test_spec_gives_the_sizes_of_lower_tiers() -> None:
    tiers = {
        "memory": {"size": "4Gi"},
        "disk": {"size": "100Gi"},
        "remote": {"managed": {"shards": 3, "memoryPerShard": "8Gi"}},
    }
    world = gathered(figures(0, disk={"used_bytes": 1}), figures(1, disk={"used_bytes": 1}), tiers=tiers)
    sizes = {tier["name"]: tier["sizeBytes"] for tier in status_of(world)["tiers"]}
    assert sizes == {"engine": 16 * GiB, "memory": 8 * GiB, "disk": 200 * GiB, "remote": 24 * GiB}


def test_size_that_needs_new_pods_is_shown_and_leads_to_doctor() -> None:
    pending = condition("Progressing", "False", "ResizePending", "900Gi needs new pods")
    shown = text(gathered(figures(0), conditions=[pending]))
    assert "Progressing is False (ResizePending): 900Gi needs new pods" in shown
    assert "kubectl lmcache doctor" in shown


def test_problems_are_first_and_lead_to_doctor() -> None:
    silent = PodFigures(broken(waiting="ErrImagePull"), problem="no answer within 3 s")
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
    assert lines[0].startswith("team/demo  Serving (2 of 3), Degraded")
    assert lines[3].startswith("demo-engine-7  no")
    assert lines[3].endswith("container engine: ErrImagePull")
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


UNPLACED = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
UNREACHED = "the sidecar does not answer: connection refused"


@pytest.mark.parametrize(
    ("shown", "cache"),
    [
        (broken(), "starting"),
        (broken(waiting="PodInitializing", phase="Pending"), "starting"),
        (pod(7, is_ready=False, phase="Pending"), "starting"),
        (broken(waiting="ErrImagePull"), "container engine: ErrImagePull"),
        (broken(phase="Failed", reason="Evicted"), "Evicted"),
        (broken(conditions=[UNPLACED]), "Unschedulable"),
        (
            broken(containerStatuses=[{"name": "engine", "lastState": {"terminated": {"exitCode": 1}}}]),
            "container engine ended with exit code 1",
        ),
        (broken(containerStatuses=[{"name": "engine", "started": True}]), UNREACHED),
        (pod(7), UNREACHED),
    ],
)  # fmt: skip
def test_pod_whose_sidecar_does_not_answer_starts_or_has_failed(shown: Any, cache: str) -> None:
    world = gathered(figures(0), PodFigures(shown, problem=UNREACHED))
    line = next(line for line in text(world).splitlines() if line.startswith("demo-engine-7"))
    assert line.endswith(f"  {cache}")
    assert ("kubectl lmcache doctor" in text(world)) == (cache != "starting")
    assert ("1 pod is starting. Wait until" in text(world)) == (cache == "starting")


def test_long_problem_ends_at_a_word() -> None:
    problem = "the answer of port 9464 is not of a sidecar: " + "some words " * 20
    assert text(gathered(PodFigures(pod(), problem=problem))).count("some words some words ...") == 1


# -- the state


def conditions(ready: str, reason: str, progressing: str = "", degraded: bool = False) -> list[Any]:
    """Return the summary conditions. ``progressing``: what is under way."""
    return [
        condition("Ready", ready, reason),
        condition("Progressing", str(bool(progressing)), progressing or "Complete"),
        condition("Degraded", str(degraded), "CrashLoopBackOff" if degraded else "AsDeclared"),
    ]


@pytest.mark.parametrize(
    ("num_ready", "listed", "state"),
    [
        (2, conditions("True", "Ready"), "Ready"),
        (2, conditions("True", "Ready", "Resizing"), "Ready, Resizing"),
        (1, conditions("False", "Replacing", "Replacing"), "Serving (1 of 2), Replacing"),
        (1, conditions("True", "Serving", "Replacing"), "Serving (1 of 2), Replacing"),
        (2, conditions("True", "Serving", "Replacing"), "Serving (2 of 2), Replacing"),
        (1, conditions("False", "Scaling", "Scaling"), "Serving (1 of 2), Scaling"),
        (
            1,
            conditions("False", "CrashLoopBackOff", "Starting", True),
            "Serving (1 of 2), Starting, Degraded",
        ),
        (2, conditions("False", "InvalidSpec", "", True), "Serving (2 of 2), Degraded"),
        (0, conditions("False", "Starting", "Starting"), "Starting (0 of 2)"),
        (
            0,
            conditions("False", "CrashLoopBackOff", "Starting", True),
            "Not ready (0 of 2), Starting, Degraded",
        ),
        (0, conditions("False", "Replacing", "Replacing"), "Not ready (0 of 2), Replacing"),
        (2, conditions("Unknown", "ApiError", "", True), "Unknown, Degraded"),
        (0, [], "No status yet"),
    ],
)
def test_state_says_how_many_pods_serve_and_what_is_under_way(
    num_ready: int, listed: Any, state: str
) -> None:
    resource = gathered(engine={"replicas": 2}).cluster
    resource["status"] |= {"readyReplicas": num_ready, "conditions": listed}
    assert state_of(resource) == state


@pytest.mark.parametrize(
    ("absent", "moving", "state"),
    [
        ("Router", "", "Not ready (no router is ready)"),
        ("Prefill", "Replacing", "Not ready (no prefill pod is ready), Replacing"),
        ("Router Prefill", "Starting", "Starting (no router and no prefill pod is ready)"),
    ],
)
def test_state_names_the_parts_that_keep_ready_engines_from_serving(
    absent: str, moving: str, state: str
) -> None:
    parts = [condition(f"{part}Available", str(part not in absent)) for part in ("Router", "Prefill")]
    resource = gathered(engine={"replicas": 2}).cluster
    listed = [*conditions("False", "RouterNotReady", moving), *parts]
    resource["status"] |= {"readyReplicas": 2, "conditions": listed, "router": {"pools": 2}}
    assert state_of(resource) == state
    resource["status"]["router"] = {"pools": 1}
    assert "prefill" not in state_of(resource), "the router does not use prefill pods yet"


def test_state_of_a_cluster_without_engines() -> None:
    scaled = gathered(engine={"replicas": 0})
    assert state_of(scaled.cluster) == "Scaled to zero"
    for ready, reason, moving, state in (
        ("True", "Ready", "", "Ready"), ("False", "Starting", "Starting", "Starting"),
        ("False", "ShardsMissing", "", "Not ready"),
    ):  # fmt: skip
        resource = gathered(conditions=conditions(ready, reason, moving)).cluster
        del resource["spec"]["engine"]
        assert state_of(resource) == state


def test_normal_rollout_does_not_lead_to_doctor() -> None:
    starting = PodFigures(broken(1), problem=UNREACHED)
    shown = text(gathered(figures(0), starting, conditions=conditions("True", "Serving", "Replacing")))
    assert "Progressing is True (Replacing): a message" in shown
    assert "doctor" not in shown


def test_normal_start_and_end_of_pods_do_not_lead_to_doctor() -> None:
    stopping, starting = PodFigures(pod(0), problem=UNREACHED), PodFigures(broken(1), problem=UNREACHED)
    stopping.pod["metadata"]["deletionTimestamp"] = time_before_now(3)
    absent = condition("Ready", "False", "NoEngineReady")
    shown = text(gathered(stopping, starting, conditions=[absent]))
    assert next(line for line in shown.splitlines() if line.startswith("demo-engine-0")).endswith(
        "  stopping"
    )
    assert "doctor" not in shown
    assert "doctor" in text(gathered(stopping, conditions=[absent]))


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
    assert table(shown, "SAVINGS") == [
        "SAVINGS IN 2 HOURS        USD",
        "2.00 hours of GPU time  +6.00",
        "cost of the tiers       -1.00",
        "net                     +5.00",
        "With a hit, the first token arrives 1.6s earlier at the median, and 1.73s earlier at p95.",
    ]
    assert "SAVINGS" not in text(gathered(figures()))
    on_cpus = gathered(figures(benefit=saved), autoscaling={"prices": prices}, engine={"gpu": {"count": 0}})
    assert table(text(on_cpus), "With a hit") == table(shown, "SAVINGS")[-1:]
    assert "USD" not in text(on_cpus)
    speed = {"gpus": 1, "prefill_tokens_per_second": 500.0}
    priced = [gathered(figures(lookups=speed), engine={"gpu": {"count": number}}) for number in (0, 1)]
    assert [price_of_token(each) > 0 for each in priced] == [False, True]
    young = gathered(figures(benefit=saved, uptime_seconds=59.0), autoscaling={"prices": prices})
    assert "SAVINGS" not in text(young)
    small = {"saved_gpu_seconds": 5.0, "tier_byte_seconds": {"memory": 1.0}}
    assert "0.00" not in text(gathered(figures(benefit=small)))


def test_colors_change_no_column() -> None:
    world = gathered(figures(0), PodFigures(pod(1, is_ready=False), problem="no answer"))
    colored = text(world, colors=True)
    assert "\x1b[32m" in colored
    assert re.sub("\x1b\\[[0-9;]*m", "", colored) == text(world)


def test_documents_are_the_same_in_json_and_yaml() -> None:
    status = status_of(gathered(figures()))
    assert json.loads(printing.document(status, "json")) == yaml.safe_load(printing.document(status, "yaml"))
    assert list(status) == [
        "version", "namespace", "name", "state", "replicas", "readyReplicas", "hitPercent", "operator",
        "time", "pods", "tiers", "promptTokens", "causeTokens", "conditions", "savings", "findings",
        "problems",
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


def test_escape_sequences_in_conditions_do_not_reach_the_terminal() -> None:
    bad = [condition(kind, "True", "\x1b[2Jx", "\x1b[2Jy") for kind in ("Progressing", "Degraded\x1b[2J")]
    shown = text(gathered(figures(), conditions=[condition("Ready", "False"), *bad]))
    assert "\x1b" not in shown
    assert "Progressing is True ([2Jx): [2Jy" in shown
