"""The schemas that `make check` holds rendered manifests against refuse what the API server would refuse."""

import json

from tools.kube import schemas

DEFINITION = {
    "type": "object",
    "description": "prose",
    "properties": {
        "count": {"type": "integer"},
        "port": {"type": "string", "format": "int-or-string"},
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "next": {"$ref": "#/definitions/Other"},
        "$ref": {"type": "string"},
    },
    "required": ["count"],
}


def openapi() -> dict:
    definitions: dict = {"Other": {"type": "object"}, "Unused": {"type": "object"}}
    for number, kind in enumerate(schemas.KINDS):
        group_version, _, name = kind.rpartition("/")
        group, _, version = group_version.rpartition("/")
        gvk = {"group": group, "version": version, "kind": name}
        definitions[f"D{number}"] = {**DEFINITION, "x-kubernetes-group-version-kind": [gvk]}
    return {"definitions": definitions}


def test_only_needed_definitions_are_kept_without_prose_and_closed():
    schema = schemas.convert(openapi())
    assert "Unused" not in schema["definitions"]
    assert "Other" in schema["definitions"]
    kept = schema["definitions"]["D0"]
    assert kept["additionalProperties"] is False
    assert kept["required"] == ["count"]
    assert kept["properties"]["port"] == {"type": ["integer", "string"]}
    assert kept["properties"]["labels"]["additionalProperties"] == {"type": "string"}
    assert "prose" not in json.dumps(schema)


def test_every_kind_has_its_rule_by_group_and_version():
    schema = schemas.convert(openapi())
    pairs = [(r["if"]["properties"]["apiVersion"]["const"], r["if"]["properties"]["kind"]["const"])
             for r in schema["allOf"]]  # fmt: skip
    assert ["/".join(pair) for pair in pairs] == list(schemas.KINDS)
    assert schema["anyOf"] == [rule["if"] for rule in schema["allOf"]]


def test_the_committed_schemas_are_of_the_kinds_that_we_make():
    committed = json.loads(schemas.SCHEMAS.read_text())
    assert len(committed["allOf"]) == len(schemas.KINDS)
    pod = committed["definitions"]["io.k8s.api.core.v1.PodSpec"]
    assert pod["additionalProperties"] is False
    assert "containers" in pod["properties"]
