"""Schemas with which `make check` validates rendered manifests. They must be as strict as the API server."""

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


def test_convert_keeps_needed_definitions_closed_and_without_descriptions():
    schema = schemas.convert(openapi())
    assert "Unused" not in schema["definitions"]
    assert "Other" in schema["definitions"]
    definition = schema["definitions"]["D0"]
    assert definition["additionalProperties"] is False
    assert definition["required"] == ["count"]
    assert definition["properties"]["port"] == {"type": ["integer", "string"]}
    assert definition["properties"]["labels"]["additionalProperties"] == {"type": "string"}
    assert "prose" not in json.dumps(schema)


def test_every_kind_has_a_rule_by_group_and_version():
    schema = schemas.convert(openapi())
    pairs = [(r["if"]["properties"]["apiVersion"]["const"], r["if"]["properties"]["kind"]["const"])
             for r in schema["allOf"]]  # fmt: skip
    assert ["/".join(pair) for pair in pairs] == list(schemas.KINDS)
    assert schema["anyOf"] == [rule["if"] for rule in schema["allOf"]]


def test_committed_schemas_cover_the_rendered_kinds():
    committed = json.loads(schemas.SCHEMAS.read_text())
    assert len(committed["allOf"]) == len(schemas.KINDS)
    pod = committed["definitions"]["io.k8s.api.core.v1.PodSpec"]
    assert pod["additionalProperties"] is False
    assert "containers" in pod["properties"]
