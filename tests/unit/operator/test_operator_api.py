"""The resource: one source for CRD and parser, and errors that name the field."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lmcache_operator.api.crd import crd, render
from lmcache_operator.api.fields import is_part
from lmcache_operator.api.parse import InvalidSpec, declared, parse
from lmcache_operator.api.quantity import format_mebibytes, parse_quantity, quantity_equal
from lmcache_operator.api.types import Model, Spec, Status

from lmcache.tiers.address import Address
from tests.harness.operator_model import MINIMAL_SPEC, cluster

ROOT = Path(__file__).resolve().parents[3]
REMOTE_URL = "spec.tiers.remote.external.url"
REMOTE = {"external": {"url": "redis://redis:6379/0"}}

INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"model": {"name": ""}}, "spec.model.name", "does not match"),
    ({"model": {"name": "--api-key"}}, "spec.model.name", "does not match"),
    ({"model": None}, "spec.model", "is required"),
    ({"modell": {}}, "spec.modell", "not a known field"),
    ({"engine": []}, "spec.engine", "must be an object"),
    ({"engine": {"replicas": -1}}, "spec.engine.replicas", "at least 0"),
    ({"engine": {"replicas": 1001}}, "spec.engine.replicas", "at most 1000"),
    ({"engine": {"replicas": "2"}}, "spec.engine.replicas", "must be an integer, not '2'"),
    ({"engine": {"replicas": True}}, "spec.engine.replicas", "must be an integer, not True"),
    ({"engine": {"gpu": {"count": 2}}}, "spec.engine", "tensor x parallelism.pipeline must equal gpu.count"),
    ({"engine": {"args": "--x"}}, "spec.engine.args", "must be a list"),
    ({"engine": {"args": [1]}}, "spec.engine.args[0]", "must be a string, not 1"),
    ({"engine": {"args": ["x" * 4097]}}, "spec.engine.args[0]", "too long: more than 4096 characters"),
    ({"engine": {"args": ["--x"] * 65}}, "spec.engine.args", "too long: more than 64 items"),
    ({"engine": {"args": ["--tensor_parallel_size=2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"args": ["-tp", "2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"podTemplate": "x"}}, "spec.engine.podTemplate", "must be an object"),
    ({"sidecar": {"transfer": "CudaIPC"}}, "spec.sidecar.transfer", "not a known field"),
    ({"engine": {"gpu": {"deviceClassName": "x"}}}, "spec.engine.gpu.deviceClassName", "not a known field"),
    ({"sidecar": {"chunkTokens": 100}}, "spec.sidecar.chunkTokens", "multiple of 16"),
    ({"tiers": {"memory": {"size": "64"}}}, "spec.tiers.memory.size", "between 64Mi and 16Ti"),
    ({"tiers": {"memory": {"size": "17Ti"}}}, "spec.tiers.memory.size", "between 64Mi and 16Ti"),
    ({"tiers": {"memory": {"size": "4GB"}}}, "spec.tiers.memory.size", "does not match"),
    ({"tiers": {"memory": {"size": "4Gi\n"}}}, "spec.tiers.memory.size", "does not match"),
    ({"tiers": {"remote": {}}}, "spec.tiers.remote", "exactly one of"),
    ({"tiers": {"remote": {**REMOTE, "managed": {}}}}, "spec.tiers.remote", "exactly one of"),
    ({"tiers": {"remote": {"managed": {}}}}, "spec.tiers.remote", "not available in this version"),
    ({"tiers": {"remote": {"clusterRef": {}}}}, "spec.tiers.remote", "not available in this version"),
    ({"tiers": {"remote": {"external": {"url": "redis://u:p@h"}}}}, "spec.tiers.remote.external.url",
    "authSecretRef"), ({"tiers": {"remote": {"external": {"url": "http://h"}}}},
    "spec.tiers.remote.external.url", "does not match"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "sentence"), INVALID)
def test_an_invalid_spec_is_refused_with_its_path(changes: dict[str, Any], path: str, sentence: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(cluster(**changes))
    assert caught.value.path == path
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://kv",
        "redis://kv:6379/1",
        "rediss://kv.cache.svc:6380/0?verify=ca",
        "redis://kv-0.kv:6379,kv-1.kv:6379,kv-2.kv/2?prefix=team-a",
        "redis-sentinel://s-0:26379,s-1:26379/mymaster/1",
        "rediss-cluster://node-0:6379,node-1:6379?prefix=a&verify=none",
    ],
)
def test_a_remote_url_that_is_accepted_means_something_to_the_sidecar(url: str) -> None:
    spec = parse(cluster(tiers={"remote": {"external": {"url": url}}})).spec
    assert spec.tiers.remote is not None
    assert spec.tiers.remote.external is not None
    Address.parse(spec.tiers.remote.external.url)


@pytest.mark.parametrize("spec", [None, 5, [], {}, {"model": 1, "tiers": 2}])
def test_garbage_is_refused_and_never_crashes(spec: Any) -> None:
    with pytest.raises(InvalidSpec):
        parse(cluster() | {"spec": spec})


@pytest.mark.parametrize(
    ("metadata", "path", "sentence"),
    [
        (None, "metadata", "must be an object"),
        ({}, "metadata.name", "must be a string"),
        ({"name": "8b"}, "metadata.name", "must start with a letter"),
        ({"name": "x" * 46}, "metadata.name", "at most 45 characters"),
    ],
)
def test_a_name_that_no_child_could_have_is_refused(metadata: Any, path: str, sentence: str) -> None:
    with pytest.raises(InvalidSpec) as caught:
        parse(cluster() | {"metadata": metadata})
    assert caught.value.path == path
    assert sentence in str(caught.value)


def test_defaults_fill_a_minimal_spec() -> None:
    spec = parse(cluster()).spec
    assert (spec.engine.replicas, spec.engine.args) == (1, [])
    assert spec.engine.gpu.resource_name == "nvidia.com/gpu"
    assert spec.sidecar.chunk_tokens == 256
    assert spec.tiers.memory.num_bytes == 2**30
    assert spec.tiers.remote is None


def test_an_engine_without_gpu_may_have_several_ranks() -> None:
    engine = parse(cluster(engine={"gpu": {"count": 0}, "parallelism": {"tensor": 2}})).spec.engine
    assert engine.parallelism.tensor == 2


def test_declared_leaves_out_what_the_user_did_not_choose() -> None:
    """Else a field that a later version adds would restart every pod."""
    assert declared(parse(cluster()).spec) == {
        "model": {"name": "org/model"}, "tiers": {"memory": {"size": "1Gi"}},
    }  # fmt: skip
    spelt_out = cluster(engine={"replicas": 1, "gpu": {"count": 1}}, sidecar={"chunkTokens": 256})
    assert declared(parse(spelt_out).spec) == declared(parse(cluster()).spec)


def test_the_crd_in_the_tree_is_up_to_date() -> None:
    assert (ROOT / "crds" / "lmcacheclusters.lmcache.io.yaml").read_text() == render()


def schema_of(path: str) -> dict[str, Any]:
    schema = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        schema = schema["properties"][name]
    return dict(schema)


def test_the_crd_says_what_the_classes_say() -> None:
    assert schema_of("spec.engine.replicas") == {
        "type": "integer", "description": schema_of("spec.engine.replicas")["description"],
        "default": 1, "minimum": 0, "maximum": 1000,
    }  # fmt: skip
    assert schema_of("spec.sidecar.chunkTokens")["multipleOf"] == 16
    assert schema_of("spec")["required"] == ["model", "tiers"]
    assert schema_of("spec.engine")["default"]["gpu"] == {"count": 1, "resourceName": "nvidia.com/gpu"}
    assert schema_of("status.conditions")["x-kubernetes-list-map-keys"] == ["type"]
    scale = crd()["spec"]["versions"][0]["subresources"]["scale"]
    assert scale["specReplicasPath"] == ".spec.engine.replicas"


def test_every_field_is_described() -> None:
    def check(cls: Any) -> None:
        for declared_field in cls.FIELDS:
            assert declared_field.description.endswith("."), declared_field.name
            if is_part(declared_field.type):
                check(declared_field.type)

    check(Spec)
    check(Status)


def test_json_names() -> None:
    names = {declared_field.name: declared_field.json_name for declared_field in Model.FIELDS}
    assert names["token_secret_ref"] == "tokenSecretRef"


@pytest.mark.parametrize(
    ("text", "amount"),
    [("64Gi", 64 * 2**30), ("500m", "0.5"), (2, 2), ("1.5k", 1500), ("1e3", 1000), ("12E", 12 * 10**18)],
)
def test_quantities(text: str | int, amount: int | str) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "Gi", "1GiB", "1 Gi", "0x10", "--1", "1e999"])
def test_what_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
    assert not quantity_equal(text, text)


@settings(deadline=None)
@given(st.integers(1, 2**50))
def test_mebibytes_round_up(num_bytes: int) -> None:
    assert 0 <= parse_quantity(format_mebibytes(num_bytes)) - num_bytes < 2**20


def test_the_minimal_spec_of_the_tests_is_left_alone() -> None:
    cluster(engine={"replicas": 2})
    assert "engine" not in MINIMAL_SPEC
