"""Tokens for the sidecar's pages: the Secret, the volume that the sidecar alone mounts, the condition."""

from typing import Any

import pytest

from lmcache_operator.components.engine.features.tokens import Tokens
from lmcache_operator.contract.base import Probed, SidecarState
from lmcache_operator.errors import RefusedError
from lmcache_operator.specs.names import PAGES_LABEL
from lmcache_sidecar.config import read
from tests.harness.operator.components import KEY, ReconciledCluster
from tests.harness.operator.injection import injected
from tests.harness.operator.injection import pod as user_pod
from tests.harness.operator.model import secret_of
from tests.harness.operator.plans import LATE, settled_world, status_of
from tests.harness.operator.render import container, env_of, part, pod_of

TOKEN = {"httpAuthentication": "Token"}
DIR = "LMCACHE_HTTP_TOKENS_DIR"
SECRET = secret_of("pages")


def volume_of(spec: dict[str, Any], sidecar_name: str = "sidecar") -> dict[str, Any]:
    """The volume from which the sidecar reads its tokens, which no other container mounts."""
    sidecar = container(spec, sidecar_name)
    options = env_of(sidecar)
    assert read({}, options).usable().http_tokens_dir == options[DIR]
    (mount,) = (each for each in sidecar["volumeMounts"] if each["mountPath"] == options[DIR])
    remaining = [each for each in spec["initContainers"] + spec["containers"] if each is not sidecar]
    assert remaining
    assert mount["name"] not in [each["name"] for other in remaining for each in other["volumeMounts"]]
    return part(spec["volumes"], mount["name"])


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
def test_sidecar_alone_mounts_the_tokens(kind: str) -> None:
    spec = pod_of(sidecar=TOKEN, engine={"kind": kind})
    items = [{"key": key, "path": key} for key in ("token", "operator")]
    secret = volume_of(spec)["secret"]
    assert secret == {"items": items, "optional": True, "secretName": SECRET.name}, "pods start without it"
    assert "serviceAccountToken" not in str(spec)


def test_injected_sidecar_alone_mounts_the_tokens() -> None:
    spec = injected(user_pod(), sidecar=TOKEN)[0]["spec"]
    assert volume_of(spec, "lmcache-sidecar")["secret"]["secretName"] == SECRET.name


def test_secret_is_made_once_and_again_after_its_deletion() -> None:
    bench = ReconciledCluster.settled(sidecar=TOKEN)
    first = bench.world.objects[SECRET]
    assert first["metadata"]["ownerReferences"][0]["uid"] == bench.world.resource["metadata"]["uid"]
    assert [*first["stringData"]] == ["token"], "this operator has no key"
    assert len(first["stringData"]["token"]) == 43
    assert bench.run() == []
    del bench.world.objects[SECRET]
    assert bench.run() == [f"create {SECRET}"]
    token = bench.world.objects[SECRET]["stringData"]["token"]
    assert token != first["stringData"]["token"]
    assert token not in str([bench.world.resource, *bench.world.pods.values()])


def test_secret_has_the_token_that_the_operator_sends() -> None:
    bench = ReconciledCluster.settled(sidecar=TOKEN)
    del bench.world.objects[SECRET]
    bench.reconciler._token_of = lambda uid: f"token-for-{uid}"
    bench.run()
    stored = bench.world.objects[SECRET]["stringData"]
    assert stored["operator"] == f"token-for-{KEY.uid}"
    assert stored["token"] != stored["operator"]


def test_secret_that_a_quota_refuses_is_reported_and_nothing_else_stops() -> None:
    bench = ReconciledCluster.settled(sidecar=TOKEN)
    bench.world.failures["create"] = RefusedError("create", "exceeded quota: q")
    events = len(bench.world.events)
    assert [bench.run() for _ in range(3)] == [["status"], [], []]
    assert bench.world.events[events:] == [("Warning", "Refused")]
    assert bench.condition("Ready") == ("True", "Ready")
    (degraded,) = (c for c in bench.world.resource["status"]["conditions"] if c["type"] == "Degraded")
    assert degraded["message"] == f"creation of {SECRET}: exceeded quota: q"


def test_secret_that_no_right_allows_degrades_the_cluster() -> None:
    bench = ReconciledCluster.settled(sidecar=TOKEN)
    bench.world.failures["create"] = RefusedError("create", "forbidden: User o")
    bench.run()
    assert bench.degraded() == ("True", f"creation of {SECRET}: forbidden: User o")


def test_other_troubles_precede_a_full_quota() -> None:
    bench = ReconciledCluster.settled(sidecar=TOKEN)
    bench.world.failures["create"] = RefusedError("create", "exceeded quota: q")
    bench.answer({"is_ready": False, "not_ready_reason": "bad URL"})
    bench.run()
    (degraded,) = (c for c in bench.world.resource["status"]["conditions"] if c["type"] == "Degraded")
    assert degraded["reason"] == "SidecarNotReady"


def test_no_secret_is_made_without_the_setting() -> None:
    assert SECRET not in ReconciledCluster.settled().world.objects


def test_pods_with_tokens_have_a_label_that_monitors_skip() -> None:
    def labels(**changes: Any) -> dict[str, str]:
        world = settled_world(**changes)
        (pod,) = world.pods.values()
        return dict(pod["metadata"]["labels"])

    assert PAGES_LABEL not in labels()
    assert labels(sidecar=TOKEN)[PAGES_LABEL] == "Token"


@pytest.mark.parametrize(("sidecar", "is_named"), [(TOKEN, True), ({}, False)])
def test_condition_of_silent_sidecars_names_the_token(sidecar: dict[str, Any], is_named: bool) -> None:
    world = settled_world(sidecar=sidecar)
    status = status_of(world, probed=Probed((SidecarState(pod="p", answers=False),), True), now=LATE)
    (attached,) = (each for each in status["conditions"] if each["type"] == "SidecarAttached")
    assert attached["reason"] == "NoAnswer"
    assert "Let the operator reach port 9464" in attached["message"]
    assert ("refused its token: see the log of the sidecar" in attached["message"]) is is_named


REQUIRED = SidecarState(pod="good", features={Tokens.name: True})
OLD, SILENT = SidecarState(pod="old"), SidecarState(pod="silent", answers=False)


@pytest.mark.parametrize(
    ("sidecars", "is_certain", "expected"),
    [
        ((REQUIRED, REQUIRED), True, ("True", "Required", "All 2 sidecars ask for tokens.")),
        ((REQUIRED, OLD), True, ("False", "PagesOpen", "pod old: it does not ask for tokens. If its im")),
        ((OLD, SILENT), True, ("False", "PagesOpen", "1 of 2 sidecars show their pages to clients without")),
        ((REQUIRED, SILENT), True, ("Unknown", "NoAnswer", "First: pod silent. See the condition Sidecar")),
        ((), True, None),
    ],
)
def test_condition_says_which_sidecars_ask_for_no_tokens(sidecars, is_certain, expected):
    world = settled_world(sidecar=TOKEN)
    status = status_of(world, probed=Probed(sidecars, is_certain), now=LATE)
    by_type = {each["type"]: each for each in status["conditions"]}
    if expected is None:
        assert "TokensRequired" not in by_type
        return
    condition = by_type["TokensRequired"]
    assert (condition["status"], condition["reason"]) == expected[:2]
    assert expected[2] in condition["message"]
    assert by_type["Degraded"]["status"] == str(expected[1] == "PagesOpen")


def test_pods_without_the_setting_are_being_replaced() -> None:
    world = settled_world()
    world.change(sidecar=TOKEN)
    status = status_of(world, probed=Probed((OLD,), True), now=LATE)
    (condition,) = (each for each in status["conditions"] if each["type"] == "TokensRequired")
    assert (condition["status"], condition["reason"]) == ("False", "Replacing")
    assert "do not ask for tokens yet" in condition["message"]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"http_authentication": "Token"}, True),
        ({"http_authentication": "None"}, False),
        ({"http_authentication": ["Token"]}, False),
        ({}, False),
    ],
)
def test_mode_is_read_from_the_figures_of_a_sidecar(stats: dict[str, Any], expected: bool) -> None:
    assert Tokens().read(stats) is expected
