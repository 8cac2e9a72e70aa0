"""Drift of a child, detected by the managed fields that the API server records."""

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
# As kube-apiserver 1.34 records it: dropped values, but neither null nor empty lists of named items.
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
PORT = 'k:{"containerPort":80,"protocol":"TCP"}'
ENGINE = (*POD, "f:containers", 'k:{"name":"c"}')


def live(fields: Any = None, **entry: Any) -> dict[str, Any]:
    operator = {"manager": "lmcache-operator", "operation": "Apply", "fieldsV1": fields or RECORDED} | entry
    status = {"manager": "kube-controller-manager", "operation": "Update", "subresource": "status"}
    return {"metadata": {"managedFields": [status | {"fieldsV1": {}}, operator]}}


def without_field(fields: Any, path: tuple[str, ...]) -> Any:
    """The record without a field. The API server does not record parents that are empty without it."""
    name, *remaining_path = path
    inner = without_field(fields[name], tuple(remaining_path)) if remaining_path else {}
    return {key: value for key, value in fields.items() if key != name} | ({name: inner} if inner else {})


def test_unchanged_object_has_no_lost_fields() -> None:
    assert lost_fields(WANTED, live()) == []


@pytest.mark.parametrize(
    ("path", "spelled"),
    [
        ((*POD, "f:hostNetwork"), "spec.template.spec.hostNetwork"),
        (("f:metadata", "f:annotations", "f:h"), "metadata.annotations.h"),
        (("f:spec", "f:selector"), "spec.selector"),
        ((*ENGINE, "f:image"), "spec.template.spec.containers[c].image"),
        ((*ENGINE, "f:env", 'k:{"name":"E"}', "f:value"), "spec.template.spec.containers[c].env[E].value"),
        ((*ENGINE, "f:ports", PORT, "f:hostPort"), "spec.template.spec.containers[c].ports[80/TCP].hostPort"),
        ((*POD, "f:volumes", 'k:{"name":"v"}', "f:emptyDir"), "spec.template.spec.volumes[v].emptyDir"),
    ],
)
def test_field_taken_by_another_manager_is_lost_and_can_be_omitted(path, spelled):
    fields = without_field(RECORDED, path)
    assert (lost_fields(WANTED, live(fields)), spell(path)) == ([path], spelled)
    before = copy.deepcopy(WANTED)
    remaining = without(WANTED, [path])
    assert (lost_fields(remaining, live(fields)), before) == ([], WANTED)
    assert len(json.dumps(remaining)) < len(json.dumps(WANTED))


def test_lost_metadata_keeps_name_and_namespace() -> None:
    fields = {key: value for key, value in RECORDED.items() if key != "f:metadata"}
    lost = lost_fields(WANTED, live(fields))
    assert lost == [("f:metadata", "f:annotations")]
    assert without(WANTED, lost)["metadata"] == {"name": "s", "namespace": "n"}


def test_removed_list_item_is_named_by_its_key() -> None:
    fields = without_field(RECORDED, (*POD, "f:volumes", 'k:{"name":"v"}'))
    (path,) = lost_fields(WANTED, live(fields))
    assert spell(path) == "spec.template.spec.volumes"
    fields["f:spec"]["f:template"]["f:spec"]["f:volumes"] = {'k:{"name":"other"}': {".": {}}}
    (path,) = lost_fields(WANTED, live(fields))
    assert spell(path) == "spec.template.spec.volumes[v]"
    assert without(WANTED, [path])["spec"]["template"]["spec"]["volumes"] == []


@pytest.mark.parametrize(
    "record", [{"manager": "kubectl"}, {"operation": "Update"}, {"subresource": "scale"}], ids=str
)
def test_record_of_another_manager_is_ignored(record: dict[str, str]) -> None:
    assert (lost_fields(WANTED, live(**record)), lost_fields(WANTED, {"metadata": {}})) == ([()], [()])
