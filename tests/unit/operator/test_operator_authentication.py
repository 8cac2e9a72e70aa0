"""Tokens for the sidecar's pages: the volume that the sidecar alone mounts, its options, the condition."""

from typing import Any

import pytest
from lmcache_operator.components.base import Probed, Sidecar
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.reconcile.probe import read_sidecar
from lmcache_sidecar.config import read

from tests.harness.operator_injection import injected
from tests.harness.operator_injection import pod as user_pod
from tests.harness.operator_plans import LATE, settled_world, status_of
from tests.harness.operator_render import container, env_of, part, pod_of

REVIEW = {"httpAuthentication": "TokenReview"}
DIR = "LMCACHE_HTTP_AUTHENTICATION_DIR"


def volume_of(spec: dict[str, Any], sidecar_name: str = "sidecar") -> dict[str, Any]:
    """The volume from which the sidecar reads its token, which no other container mounts."""
    sidecar = container(spec, sidecar_name)
    options = env_of(sidecar)
    assert read({}, options).usable().http_authentication == "TokenReview"
    (mount,) = (each for each in sidecar["volumeMounts"] if each["mountPath"] == options[DIR])
    remaining = [each for each in spec["initContainers"] + spec["containers"] if each is not sidecar]
    assert remaining
    assert mount["name"] not in [each["name"] for other in remaining for each in other["volumeMounts"]]
    return part(spec["volumes"], mount["name"])


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
@pytest.mark.parametrize("payload", ["InitContainer", "ImageVolume"])
def test_sidecar_alone_gets_a_token(kind: str, payload: str) -> None:
    spec = pod_of(sidecar=REVIEW | {"payload": payload}, engine={"kind": kind})
    token, authority = volume_of(spec)["projected"]["sources"]
    assert token == {"serviceAccountToken": {"expirationSeconds": 3600, "path": "token"}}
    assert authority["configMap"]["name"] == "kube-root-ca.crt"
    assert authority["configMap"]["optional"] is True, "pods start without it"
    assert spec["automountServiceAccountToken"] is False
    assert str(spec).count("serviceAccountToken") == 1


@pytest.mark.parametrize("payload", ["InitContainer", "ImageVolume"])
def test_injected_sidecar_alone_gets_a_token(payload: str) -> None:
    spec = injected(user_pod(), sidecar=REVIEW | {"payload": payload})[0]["spec"]
    _, authority = volume_of(spec, "lmcache-sidecar")["projected"]["sources"]
    assert authority["configMap"]["optional"] is True


def test_users_volume_of_the_same_name_is_no_token() -> None:
    engine = {"name": "engine", "volumeMounts": [{"mountPath": "/x", "name": "api-access"}]}
    volumes = [{"name": "api-access", "emptyDir": {}}]
    template = {"spec": {"containers": [engine], "volumes": volumes}}
    pod_of(engine={"podTemplate": template})
    with pytest.raises(InvalidSpecError, match="api-access"):
        pod_of(sidecar=REVIEW, engine={"podTemplate": template})


@pytest.mark.parametrize(("sidecar", "is_named"), [(REVIEW, True), ({}, False)])
def test_condition_of_silent_sidecars_names_the_token(sidecar: dict[str, Any], is_named: bool) -> None:
    world = settled_world(sidecar=sidecar)
    status = status_of(world, probed=Probed((Sidecar(pod="p", answers=False),), True), now=LATE)
    (attached,) = (each for each in status["conditions"] if each["type"] == "SidecarAttached")
    assert attached["reason"] == "NoAnswer"
    assert "Let the operator reach port 9464" in attached["message"]
    assert ("refused its token: see the log of the sidecar" in attached["message"]) is is_named


REQUIRED = Sidecar(pod="good", requires_tokens=True)
OLD, SILENT = Sidecar(pod="old"), Sidecar(pod="silent", answers=False)


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
    world = settled_world(sidecar=REVIEW)
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
    world.change(sidecar=REVIEW)
    status = status_of(world, probed=Probed((OLD,), True), now=LATE)
    (condition,) = (each for each in status["conditions"] if each["type"] == "TokensRequired")
    assert (condition["status"], condition["reason"]) == ("False", "Replacing")
    assert "do not ask for tokens yet" in condition["message"]


def test_condition_is_absent_without_the_setting() -> None:
    status = status_of(settled_world(), probed=Probed((OLD,), True), now=LATE)
    assert "TokensRequired" not in [each["type"] for each in status["conditions"]]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        ({"http_authentication": "TokenReview"}, True),
        ({"http_authentication": "None"}, False),
        ({"http_authentication": ["TokenReview"]}, False),
        ({}, False),
    ],
)
def test_mode_is_read_from_the_figures_of_a_sidecar(stats: dict[str, Any], expected: bool) -> None:
    assert read_sidecar(stats).requires_tokens is expected
