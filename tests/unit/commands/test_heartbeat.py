"""Statements of the commands about the operator, by its heartbeat in the status of a cluster."""

from pathlib import Path
from typing import Any

import pytest

from lmcache_cli.commands import printing
from lmcache_cli.commands.gather import Gathered, PodFigures
from lmcache_cli.commands.status import status_of, summary_of
from lmcache_cli.commands.status_screen import list_lines
from tests.harness.commands.command_world import NOW, GiB, figures, gathered, stats, time_before_now
from tests.unit.commands.test_status import UNREACHED, broken, conditions, text

DOCS = Path(__file__).parents[3] / "docs"


def with_operator(heartbeat: float | None, *, generation: int = 2, **status: Any) -> Gathered:
    """Return a changed cluster with the age of the operator's last heartbeat."""
    world = gathered(figures(0))
    world.cluster["metadata"] |= {"generation": generation, "creationTimestamp": time_before_now(3600)}
    world.cluster["status"] |= status
    world.cluster["status"].pop("lastHeartbeatTime")
    if heartbeat is not None:
        world.cluster["status"]["lastHeartbeatTime"] = time_before_now(heartbeat)
    return world


PENDING = "Your last change is not applied yet."
UNSERVED = "No operator works on team/demo: the conditions are"


@pytest.mark.parametrize(
    ("world", "lines"),
    [
        (with_operator(180), [f"{UNSERVED} 3 minutes old, and your last change is not applied.", "->"]),
        (with_operator(7200, generation=1), [f"{UNSERVED} 2 hours old.", "->"]),
        (
            with_operator(20),
            [f"{PENDING} An operator last reported 20 seconds ago. If this does not change:", "->"],
        ),
        (with_operator(None), [f"{PENDING} If this does not change:", "->"]),
        (with_operator(149, generation=1), []),
        (with_operator(None, generation=1), []),
        (
            with_operator(None, conditions=[], observedGeneration=None),
            ["No operator works on team/demo: it has no status, 1 hour after its creation.", "->"],
        ),
    ],
)
def test_first_lines_say_whether_an_operator_works(world: Gathered, lines: list[str]) -> None:
    shown = text(world, width=120).splitlines()
    wanted = [line.replace("->", "-> kubectl lmcache doctor -n team demo") for line in lines]
    assert all(line.startswith(start) for line, start in zip(shown, wanted, strict=False)), shown[:2]
    assert shown[len(wanted) + bool(wanted)].startswith("team/demo  ")


def test_heartbeat_is_judged_by_the_clock_of_the_api_server() -> None:
    world = with_operator(20, generation=1)
    late = Gathered(world.cluster, world.pods, (), NOW + 3600, api_offset=-3600)
    assert not status_of(late)["operator"]["problem"]


def test_several_clusters_become_a_list() -> None:
    served, orphaned = with_operator(20, generation=1), with_operator(600)
    served.cluster["status"]["hitPercent"] = {"engine": 20, "memory": 30, "remote": 10}
    remote = gathered(conditions=conditions("True", "Ready")).cluster
    del remote["spec"]["engine"]
    listed = [summary_of(each, NOW) for each in (served.cluster, orphaned.cluster, remote)]
    assert [*list_lines(listed, printing.Style(False))] == [
        "NAMESPACE  NAME  STATE    PODS  FROM TIERS  OWN CACHE  HEARTBEAT",
        "team       demo  Ready  1 of 1        40 %       20 %  20 seconds ago",
        "team       demo  Ready  1 of 1           -          -  10 minutes ago",
        "team       demo  Ready       -           -          -  20 seconds ago",
        "",
        f"{UNSERVED} 10 minutes old, and your last change is not applied.",
        "More about one of them: kubectl lmcache status -n team demo",
    ]


def test_reference_shows_what_the_command_prints() -> None:
    shown = (DOCS / "reference" / "commands.md").read_text()
    saved = {
        "saved_gpu_seconds": 7200.0,
        "tier_byte_seconds": {"memory": 4.0 * GiB * 7200},
        "first_tokens": {"1024": {"tier": {"0.25": 10}, "none": {"2": 10}}},
    }
    causes = stats()["causes"] | {"cause_tokens": {"engine": 100, "memory": 500, "new": 400}}
    replacing = "Replacing engine pods: 1 of 2 do not match the spec yet"
    summary = conditions("True", "Serving", "Replacing")
    summary[1]["message"] = replacing
    starting = PodFigures(broken(1), problem=UNREACHED)
    world = gathered(figures(0, benefit=saved, causes=causes), starting, conditions=summary)
    assert f"```text\n{text(world)}\n```" in shown
    absent = text(with_operator(180), width=110).split("\n\n")[0]
    assert f"```text\n{absent}\n```" in shown
    small, large = gathered(engine={"replicas": 1}).cluster, gathered(engine={"replicas": 2}).cluster
    small["status"] |= {"readyReplicas": 1, "hitPercent": {"engine": 20, "memory": 40}}
    large["status"] |= {"readyReplicas": 1, "hitPercent": {"engine": 60, "memory": 7, "disk": 3}}
    large["status"] |= {
        "lastHeartbeatTime": time_before_now(50),
        "conditions": conditions("True", "Serving", "Scaling"),
    }
    large["metadata"]["name"] = "large"
    listed = list_lines([summary_of(each, NOW) for each in (small, large)], printing.Style(False))
    assert "```text\n{}\n```".format("\n".join(listed)) in shown
