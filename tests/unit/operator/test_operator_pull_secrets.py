"""`spec.images.pullSecrets` on every pod that the operator creates."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.injection.profile import profile
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import SPEC_HASH
from tests.harness.operator.model import cluster
from tests.harness.operator.prefill import child, with_prefill
from tests.harness.operator.render import CONTEXT, render

BOTH = {"images": {"pullSecrets": ["registry", "mirror"]}}
TIERS = {"peers": {}, "remote": {"managed": {"memoryPerShard": "1Gi"}}}
WHOLE: dict[str, Any] = with_prefill() | {"tiers": TIERS}


def templates(resource: dict[str, Any]) -> dict[str, Any]:
    """The pod templates, by the names of the objects that have them."""
    rendered, kinds = render(resource, *COMPONENTS).items(), ("StatefulSet", "Deployment")
    return {ref.name: child["spec"]["template"] for ref, child in rendered if ref.kind in kinds}


def all_templates(**changes: Any) -> dict[str, Any]:
    changes = WHOLE | changes
    return templates(cluster(**changes)) | templates(child(changes))


def test_all_pods_of_the_operator_get_the_secrets() -> None:
    made = all_templates(**BOTH)
    assert sorted(made) == ["demo-engine", "demo-prefill-engine", "demo-remote", "demo-router"]
    for name, template in made.items():
        assert template["spec"]["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}], name


def test_pods_without_the_field_have_no_secrets() -> None:
    for template in (*all_templates().values(), *all_templates(images={"pullSecrets": []}).values()):
        assert "imagePullSecrets" not in template["spec"]


def test_change_replaces_all_pods() -> None:
    """The Deployment's controller replaces routers, for any change of the template."""
    before, after = all_templates(), all_templates(**BOTH)
    for name in before.keys() - {"demo-router"}:
        hashes = {each[name]["metadata"]["annotations"][SPEC_HASH] for each in (before, after)}
        assert len(hashes) == 2, name
    assert before["demo-router"] != after["demo-router"]


def test_secrets_of_the_pod_template_are_added_once() -> None:
    pod = {"spec": {"imagePullSecrets": [{"name": "mirror"}, {"name": "mine"}]}}
    spec = templates(cluster(**BOTH, engine={"podTemplate": pod}))["demo-engine"]["spec"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}, {"name": "mirror"}, {"name": "mine"}]


def test_pod_template_cannot_remove_the_secrets() -> None:
    resource = cluster(**BOTH)
    resource["spec"]["engine"]["podTemplate"] = {"spec": {"imagePullSecrets": None}}
    with pytest.raises(InvalidSpecError, match=r"podTemplate: changes spec\.imagePullSecrets"):
        render(resource)


def test_injection_adds_no_secrets_to_pods_of_users() -> None:
    """A list in the pod would replace the Secrets of the pod's ServiceAccount, which may pull its engine."""
    assert "imagePullSecrets" not in profile(parse(cluster(**BOTH)), CONTEXT)["spec"]


@pytest.mark.parametrize(
    ("secrets", "message"),
    [
        (["registry", "registry"], "names a Secret twice"),
        (["Registry"], "does not match"),
        ([f"s{n}" for n in range(11)], "more than 10 items"),
        ([{"name": "registry"}], "must be a string"),
    ],
)
def test_invalid_secrets_are_refused_by_their_field(secrets: list[Any], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=rf"^spec\.images\.pullSecrets.*{message}"):
        parse(cluster(images={"pullSecrets": secrets}))
