"""Whether a child is as it was applied, by what the API server recorded of it."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from lmcache_operator.specs.ownership import lost_fields, spell, without

CONTAINER = {
    "name": "c", "image": "x", "args": [],
    "env": [{"name": "E", "value": ""}],
    "ports": [{"containerPort": 80, "hostPort": 0}],
    "volumeMounts": [{"name": "v", "mountPath": "/v", "subPath": "", "readOnly": False}],
    "resources": {"limits": {"cpu": "1000m"}},
}  # fmt: skip
WANTED: dict[str, Any] = {
    "apiVersion": "apps/v1", "kind": "StatefulSet",
    "metadata": {"name": "s", "namespace": "n", "annotations": {"h": "1", "i": ""}},
    "spec": {
        "selector": {"matchLabels": {"a": "b"}},
        "template": {"spec": {
            "hostNetwork": False, "containers": [CONTAINER], "initContainers": [], "nodeSelector": {},
            "volumes": [{"name": "v", "emptyDir": {}}], "dnsConfig": {"options": []}, "nodeName": None,
        }},
    },
}  # fmt: skip
# As kube-apiserver 1.34 records it, dropped values too; but not null, nor empty lists of named items.
RECORDED = json.loads(r"""{
  "f:metadata": {"f:annotations": {"f:h": {}, "f:i": {}}},
  "f:spec": {"f:selector": {}, "f:template": {"f:spec": {
    "f:hostNetwork": {}, "f:nodeSelector": {},
    "f:containers": {"k:{\"name\":\"c\"}": {
      ".": {}, "f:name": {}, "f:image": {}, "f:args": {},
      "f:env": {"k:{\"name\":\"E\"}": {".": {}, "f:name": {}, "f:value": {}}},
      "f:ports": {"k:{\"containerPort\":80,\"protocol\":\"TCP\"}":
        {".": {}, "f:containerPort": {}, "f:hostPort": {}}},
      "f:volumeMounts": {"k:{\"mountPath\":\"/v\"}":
        {".": {}, "f:mountPath": {}, "f:name": {}, "f:readOnly": {}, "f:subPath": {}}},
      "f:resources": {"f:limits": {"f:cpu": {}}}}},
    "f:volumes": {"k:{\"name\":\"v\"}": {".": {}, "f:emptyDir": {}, "f:name": {}}}}}}
}""")
POD = ("f:spec", "f:template", "f:spec")
ENGINE = (*POD, "f:containers", 'k:{"name":"c"}')


def live(fields: Any = None, **entry: Any) -> dict[str, Any]:
    ours = {"manager": "lmcache-operator", "operation": "Apply", "fieldsV1": fields or RECORDED, **entry}
    other = {
        "manager": "kube-controller-manager",
        "operation": "Update",
        "subresource": "status",
        "fieldsV1": {},
    }
    return {"metadata": {"managedFields": [other, ours]}}


def taken(fields: Any, path: tuple[str, ...]) -> Any:
    """The record without a field; what is empty then is not recorded either."""
    name, *rest = path
    inner = taken(fields[name], tuple(rest)) if rest else {}
    return {key: value for key, value in fields.items() if key != name} | ({name: inner} if inner else {})


def test_an_object_that_nobody_touched_has_lost_nothing() -> None:
    assert lost_fields(WANTED, live()) == []


@pytest.mark.parametrize(
    ("path", "spelt"),
    [
        ((*POD, "f:hostNetwork"), "spec.template.spec.hostNetwork"),
        (("f:metadata", "f:annotations", "f:h"), "metadata.annotations.h"),
        (("f:spec", "f:selector"), "spec.selector"),
        ((*ENGINE, "f:image"), "spec.template.spec.containers[c].image"),
        ((*ENGINE, "f:env", 'k:{"name":"E"}', "f:value"), "spec.template.spec.containers[c].env[E].value"),
        (
            (*ENGINE, "f:ports", 'k:{"containerPort":80,"protocol":"TCP"}', "f:hostPort"),
            "spec.template.spec.containers[c].ports[80/TCP].hostPort",
        ),
        ((*POD, "f:volumes", 'k:{"name":"v"}', "f:emptyDir"), "spec.template.spec.volumes[v].emptyDir"),
    ],
)
def test_a_field_that_somebody_took_is_lost_named_and_can_be_left_alone(
    path: tuple[str, ...], spelt: str
) -> None:
    fields = taken(RECORDED, path)
    assert lost_fields(WANTED, live(fields)) == [path]
    assert spell(path) == spelt
    before = copy.deepcopy(WANTED)
    kept = without(WANTED, [path])
    assert lost_fields(kept, live(fields)) == []
    assert before == WANTED
    assert len(json.dumps(kept)) < len(json.dumps(WANTED))


def test_all_of_the_metadata_can_be_lost_and_the_name_stays() -> None:
    fields = {key: value for key, value in RECORDED.items() if key != "f:metadata"}
    lost = lost_fields(WANTED, live(fields))
    assert lost == [("f:metadata", "f:annotations")]
    assert without(WANTED, lost)["metadata"] == {"name": "s", "namespace": "n"}


def test_an_item_that_somebody_removed_is_named_by_what_names_it() -> None:
    fields = taken(RECORDED, (*POD, "f:volumes", 'k:{"name":"v"}'))
    (path,) = lost_fields(WANTED, live(fields))
    assert spell(path) == "spec.template.spec.volumes"
    fields["f:spec"]["f:template"]["f:spec"]["f:volumes"] = {'k:{"name":"other"}': {".": {}}}
    (path,) = lost_fields(WANTED, live(fields))
    assert spell(path) == "spec.template.spec.volumes[v]"
    assert without(WANTED, [path])["spec"]["template"]["spec"]["volumes"] == []


@pytest.mark.parametrize(
    "record", [{"manager": "kubectl"}, {"operation": "Update"}, {"subresource": "scale"}], ids=str
)
def test_what_others_recorded_is_not_ours(record: dict[str, str]) -> None:
    assert lost_fields(WANTED, live(**record)) == [()]
    assert lost_fields(WANTED, {"metadata": {}}) == [()]
