"""The LMCacheCluster resource: one source for CRD and parser, and errors that name the field."""

import contextlib
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_operator.api.crd import crd, profile_crd
from lmcache_operator.api.fields import is_part
from lmcache_operator.api.parse import declared, parse
from lmcache_operator.api.types import Spec, Status
from lmcache_operator.errors import InvalidSpecError
from lmcache_store.common.units import format_mebibytes, parse_quantity, quantity_equal
from lmcache_store.tiers.remote.address import Address
from tests.harness.operator.model import cluster
from tests.harness.scope import examples
from tools.kube.schemas import definitions

MANAGED, SHARDS = "spec.tiers.remote.managed", {"memoryPerShard": "1Gi"}
REMOTE = {"external": {"url": "redis://redis:6379/0"}}


def managed(**shards: Any) -> dict[str, Any]:
    return {"tiers": {"remote": {"managed": SHARDS | shards}}}


def nodes(number: int, tensor: int = 1, data: int = 1, **engine: Any) -> dict[str, Any]:
    return {"engine": {"nodes": number, "parallelism": {"tensor": tensor, "data": data}, **engine}}


def blending(**engine: Any) -> dict[str, Any]:
    return {"engine": {"blend": {"mode": "Request"}, "gpu": {"count": 0}, **engine}}


def nested(num_levels: int) -> dict[str, Any]:
    """An object with this many levels of nested objects."""
    value: dict[str, Any] = {}
    for _ in range(num_levels):
        value = {"spec": value}
    return value


INVALID: list[tuple[dict[str, Any], str, str]] = [
    ({"model": {"name": ""}}, "spec.model.name", "does not match"),
    ({"model": {"name": "--api-key"}}, "spec.model.name", "does not match"),
    ({"model": {"name": None}}, "spec.model.name", "is required"),
    ({"model": None}, "spec", "model and engine belong together"),
    ({"engine": None}, "spec", "model and engine belong together"),
    ({"model": None, "engine": None}, "spec", "without an engine, tiers must have tiers.remote.managed"),
    ({"tiers": {"memory": None}}, "spec", "tiers.memory is required"),
    ({"modell": {}}, "spec.modell", "not a known field"),
    ({"engine": []}, "spec.engine", "must be an object"),
    ({"engine": {"replicas": -1}}, "spec.engine.replicas", "at least 0"),
    ({"engine": {"replicas": 1001}}, "spec.engine.replicas", "at most 1000"),
    ({"engine": {"replicas": "2"}}, "spec.engine.replicas", "must be an integer, not '2'"),
    ({"engine": {"replicas": True}}, "spec.engine.replicas", "must be an integer, not True"),
    ({"engine": {"gpu": {"count": 2}}}, "spec.engine", "x pipeline x data must equal nodes x gpu.count"),
    ({"engine": {"parallelism": {"data": 2}}}, "spec.engine", "data must equal nodes x gpu.count"),
    ({"engine": {"parallelism": {"data": 257}}}, "spec.engine.parallelism.data", "at most 256"),
    (nodes(33), "spec.engine.nodes", "at most 32"),
    (nodes(2), "spec.engine", "x data must equal nodes x gpu.count"),
    (nodes(2, gpu={"count": 0}, data=3), "spec.engine", "data to a multiple of nodes, or to 1"),
    (nodes(2, gpu={"count": 0}, tensor=3), "spec.engine", "1, tensor x pipeline must be a multiple of nodes"),
    (nodes(2, gpu={"count": 6}, tensor=4, data=3), "spec.engine", "fill whole pods, or a pod whole ranks"),
    (nodes(4, tensor=2, data=2), "spec.engine", "data to a multiple of nodes, or to 1"),
    (nodes(2, data=2, topologyKey="a/b/c"), "spec.engine.topologyKey", "does not match"),
    ({"engine": {"topologyKey": "rack"}}, "spec.engine", "topologyKey needs nodes > 1"),
    (nodes(2, data=2, kind="SGLang"), "spec", "engine.nodes needs engine.kind vLLM for now"),
    (nodes(2, data=2, replicas=501), "spec.engine", "replicas x nodes must be at most 1000"),
    (nodes(2, data=2, prefill={}), "spec.engine", "prefill pods span one node for now"),
    ({"engine": {"kind": "SGLang", "hintsRoute": True}}, "spec", "engine.hintsRoute needs engine.kind vLLM"),
    (blending(kind="SGLang"), "spec", "engine.blend needs engine.kind vLLM for now"),
    (blending(nodes=2, parallelism={"data": 2}), "spec.engine", "blend needs engines of one pod for now"),
    (blending(parallelism={"pipeline": 2}), "spec.engine", "set parallelism.tensor"),
    (blending(parallelism={"data": 2, "expert": True}), "spec.engine", "these ranks step together"),
    (blending(prefill={}), "spec.engine", "engine.blend does not work with engine.prefill"),
    (blending(args=["--enable_lora"]), "spec.engine", "leave out blend, or --enable-lora in args"),
    (blending(args=["--enable-lor"]), "spec.engine", "leave out blend, or --enable-lora in args"),
    ({"engine": {"blend": {"mode": False}}}, "spec.engine.blend.mode", "must be a string, not False"),
    ({"engine": {"blend": {"mode": "request"}}}, "spec.engine.blend.mode", "of ['Off', 'Request', 'Auto']"),
    ({"engine": {"blend": {"selection": "All"}}}, "spec.engine.blend.selection", "one of ['Attended', 'Dev"),
    ({"engine": {"blend": {"ratioPercent": 0.15}}}, "spec.engine.blend.ratioPercent", "must be an integer"),
    ({"engine": {"blend": {"ratioPercent": 101}}}, "spec.engine.blend.ratioPercent", "at most 100"),
    ({"engine": {"blend": {"minTokens": 0}}}, "spec.engine.blend.minTokens", "at least 1"),
    ({"engine": {"blend": {"separator": "-" * 257}}}, "spec.engine.blend.separator", "more than 256 char"),
    ({"engine": {"args": "--x"}}, "spec.engine.args", "must be a list"),
    ({"engine": {"args": [1]}}, "spec.engine.args[0]", "must be a string, not 1"),
    ({"engine": {"args": ["x" * 4097]}}, "spec.engine.args[0]", "too long: more than 4096 characters"),
    ({"engine": {"args": ["--x"] * 65}}, "spec.engine.args", "too long: more than 64 items"),
    ({"engine": {"args": ["--tensor_parallel_size=2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"args": ["-tp", "2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"args": ["--tp=2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"args": ["--pp"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"args": ["--dp-size=2"]}}, "spec.engine.args", "set engine.parallelism"),
    ({"engine": {"podTemplate": "x"}}, "spec.engine.podTemplate", "must be an object"),
    ({"sidecar": {"transfer": "cudaipc"}}, "spec.sidecar.transfer", "must be one of ['Auto', "),
    ({"engine": {"gpu": {"deviceClassName": "X"}}}, "spec.engine.gpu.deviceClassName", "does not match"),
    ({"engine": {"gpu": {"deviceClassName": "x", "resourceName": "a/b"}}}, "spec.engine.gpu", "exclude each"),
    ({"engine": {"kind": "SGLang"}, "router": {}}, "spec", "set router.policy to CacheAware"),
    ({"engine": {"kind": "SGLang", "parallelism": {"expert": True}}}, "spec", "set --ep-size in"),
    ({"sidecar": {"chunkTokens": 100}}, "spec.sidecar.chunkTokens", "multiple of 16"),
    ({"tiers": {"memory": {"size": "64"}}}, "spec.tiers.memory.size", "between 64Mi and 16Ti"),
    ({"tiers": {"memory": {"size": "17Ti"}}}, "spec.tiers.memory.size", "between 64Mi and 16Ti"),
    ({"tiers": {"memory": {"size": "4GB"}}}, "spec.tiers.memory.size", "such as 64Gi or 0.5Ti"),
    ({"tiers": {"memory": {"size": "4Gi\n"}}}, "spec.tiers.memory.size", "such as 64Gi or 0.5Ti"),
    ({"tiers": {"memory": {"size": "0.0Ti"}}}, "spec.tiers.memory.size", "between 64Mi and 16Ti"),
    ({"model": {"name": "org/mo\0del"}}, "spec.model.name", "does not match"),
    ({"engine": {"args": ["--x=\0"]}}, "spec.engine.args[0]", "does not match"),
    ({"engine": {"args": ["--data-parallel-size=2"]}}, "spec.engine.args", "and engine.replicas"),
    ({"engine": {"image": "UPPER/::bad@@"}}, "spec.engine.image", "must be an image such as"),
    ({"sidecar": {"image": "repo:tag with blank"}}, "spec.sidecar.image", "must be an image such as"),
    ({"engine": {"podTemplate": nested(1500)}}, "spec.engine.podTemplate", "more than 32 levels"),
    ({"model": {"volume": nested(1500)}}, "spec.model.volume", "more than 32 levels"),
    ({"engine": {"args": [nested(1500)]}}, "spec.engine.args[0]", "must be a string, not {"),
    ({"tiers": {"memory": {"retainPercent": 101}}}, "spec.tiers.memory.retainPercent", "at most 100"),
    ({"tiers": {"memory": {"maxTtlSeconds": 0}}}, "spec.tiers.memory.maxTtlSeconds", "at least 1"),
    ({"tiers": {"disk": {"size": "500Mi"}}}, "spec.tiers.disk.size", "between 1Gi and 1024Ti"),
    ({"tiers": {"disk": {"size": "1GB"}}}, "spec.tiers.disk.size", "such as 64Gi or 0.5Ti"),
    ({"tiers": {"disk": {}}}, "spec.tiers.disk.size", "is required"),
    ({"tiers": {"admit": "Never"}}, "spec.tiers.admit", "must be one of ['All', 'OnReuse']"),
    ({"tiers": {"remote": {}}}, "spec.tiers.remote", "exactly one of"),
    ({"tiers": {"remote": {**REMOTE, "managed": SHARDS}}}, "spec.tiers.remote", "exactly one of"),
    (managed(memoryPerShard=None), f"{MANAGED}.memoryPerShard", "is required"),
    (managed(memoryPerShard="256Mi"), f"{MANAGED}.memoryPerShard", "between 512Mi and 16Ti"),
    (managed(shards=0), f"{MANAGED}.shards", "at least 1"),
    (managed(access="All"), f"{MANAGED}.access", "must be one of"),
    (managed(resources={"limits": {"memory": "1Gi"}}), f"{MANAGED}.resources", "objects without memory"),
    (managed(resources={"limits": 2}), f"{MANAGED}.resources", "limits and requests are objects without"),
    (managed(tls={}), f"{MANAGED}.tls", "exactly one of secretRef"),
    ({"tiers": {"remote": {"clusterRef": {}}}}, "spec.tiers.remote.clusterRef.name", "is required"),
    ({"tiers": {"remote": {"external": {"url": "redis://u:p@h"}}}}, "spec.tiers.remote.external.url",
    "authSecretRef"), ({"tiers": {"remote": {"external": {"url": "http://h"}}}},
    "spec.tiers.remote.external.url", "must be redis://host:port/db"),
]  # fmt: skip


def refuse(resource: dict[str, Any], path: str, sentence: str = "") -> None:
    with pytest.raises(InvalidSpecError) as caught:
        parse(resource)
    assert (caught.value.path, sentence in str(caught.value)) == (path, True)


@pytest.mark.parametrize(("changes", "path", "sentence"), INVALID)
def test_parse_refuses_invalid_spec_and_names_the_field(changes, path, sentence):
    refuse(cluster(**changes), path, sentence)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tenants": {}}, "tenants needs an engine"),
        ({"clients": []}, "clients needs an engine"),
        ({"router": {}}, "router needs an engine"),
        ({"autoscaling": {"remote": {"maxShards": 2}}}, "autoscaling needs an engine"),
        ({"tiers": {"peers": {}}}, "none of memory, disk and peers"),
        (
            {"tiers": {"remote": {"encryption": {"secretRef": {"name": "a"}}}}},
            "needs an engine: set it at the",
        ),
    ],
)
def test_remote_tier_alone_has_no_settings_of_engines(changes, sentence):
    with pytest.raises(InvalidSpecError, match=sentence):
        parse(cluster({"tiers": {"remote": {"managed": SHARDS}}}, **changes))


REMOTE_URLS = [
    "redis://kv", "redis://kv:6379/1", "redis://[fd00::1]:6379,[fd00::2]",
    "rediss://kv.cache.svc:6380/0?verify=ca", "redis://kv-0.kv:6379,kv-1.kv:6379,kv-2.kv/2?prefix=team-a",
    "redis-sentinel://s-0:26379,s-1:26379/mymaster/1",
    "rediss-cluster://node-0:6379,node-1:6379?prefix=a&verify=none",
]  # fmt: skip
REFUSED_URLS = [
    "redis://h:99999", "redis://h:0", "redis://:6379,,,", "redis://h?verify=none", "rediss://h?verify=banana",
    "redis://h?prefix=", "redis://h/1234567890", "redis-cluster://h/1", "redis-sentinel://h",
    "unix:///run/redis.sock", "redis://h,h:6379", "redis-sentinel://h,h:26379/s", "redis://h:1:2",
    "redis://h#x",
]  # fmt: skip


def with_remote(url: str) -> dict[str, Any]:
    return cluster(tiers={"remote": {"external": {"url": url}}})


@pytest.mark.parametrize("url", REMOTE_URLS)
def test_sidecar_can_parse_accepted_remote_url(url: str) -> None:
    parse(with_remote(url))
    Address.parse(url)


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_parse_refuses_remote_url_that_the_sidecar_could_not_use(url: str) -> None:
    refuse(with_remote(url), "spec.tiers.remote.external.url")


hosts = st.sampled_from(["h", "kv-0.kv", "10.0.0.1", "[::1]", "a_b", "", "[", "h h", "%41", "ü"])
ports = st.sampled_from(["", ":1", ":6379", ":65535", ":65536", ":99999", ":0", ":06", ":", ":x", ":1:2"])
endpoints = st.lists(st.builds("{}{}".format, hosts, ports), min_size=1, max_size=3).map(",".join)
schemes = st.sampled_from(
    ["redis", "rediss", "redis-sentinel", "rediss-sentinel", "redis-cluster", "unix", "http"]
)
paths = st.sampled_from(["", "/", "/0", "/1", "/x", "/s/1", "/s/x", "/s/1/2", "/01234567890"])
query = st.sampled_from(["prefix=a", "prefix=", "prefix=%", "verify=none", "verify=x", "db=1", "ca=/f"])
queries = st.lists(query, max_size=3).map("&".join)


@settings(max_examples=examples(500))
@given(st.builds("{}://{}{}{}{}".format, schemes, endpoints, paths, st.sampled_from(["", "?"]), queries))
def test_sidecar_can_parse_every_accepted_random_remote_url(url: str) -> None:
    with contextlib.suppress(InvalidSpecError):
        parse(with_remote(url))
        Address.parse(url)


@pytest.mark.parametrize(
    "image",
    [
        "vllm", "vllm/vllm-openai:v0.32.0", "localhost:5000/a/b_c:1", "ghcr.io/a/b@sha256:" + "0" * 64,
        "R.example/a--b.c:T_1.x-y@sha256:" + "0" * 64, "[::1]:5000/x",
    ],
)  # fmt: skip
def test_parse_accepts_valid_image(image: str) -> None:
    assert parse(cluster(engine={"image": image})).spec.engine.image == image


@pytest.mark.parametrize(
    "image", ["", ":1", "a:", "a/", "/a", "A", "a@", "a:b c", "a@sha256:0", "a//b", "-a", "a\n"]
)
def test_parse_refuses_invalid_image(image: str) -> None:
    with pytest.raises(InvalidSpecError, match="must be an image such as"):
        parse(cluster(engine={"image": image}))


@pytest.mark.parametrize(
    ("metadata", "path", "sentence"),
    [
        (None, "metadata", "must be an object"),
        ({}, "metadata.name", "must be a string"),
        ({"name": "8b"}, "metadata.name", "must start with a letter"),
        ({"name": "x" * 46}, "metadata.name", "at most 45 characters"),
    ],
)
def test_parse_refuses_metadata_that_gives_children_invalid_names(metadata, path, sentence):
    refuse(cluster() | {"metadata": metadata}, path, sentence)


def test_names_of_groups_fit_into_labels() -> None:
    spec = cluster(**nodes(2, data=2))
    parse(spec | {"metadata": {"name": "x" * 41}})
    refuse(spec | {"metadata": {"name": "x" * 42}}, "metadata.name", "nodes > 1, metadata.name must have at")


def test_declared_omits_fields_with_default_values() -> None:
    """Otherwise a field that a later version adds would restart every pod."""
    minimal = {"model": {"name": "org/model"}, "tiers": {"memory": {"size": "1Gi"}}}
    assert declared(parse(cluster()).spec) == minimal
    spelt_out = cluster(engine={"replicas": 1, "gpu": {"count": 1}}, sidecar={"chunkTokens": 256})
    assert declared(parse(spelt_out).spec) == minimal


def test_free_form_objects_limit_their_nesting() -> None:
    """The API server must not accept unlimited nesting: no JSON reader could read a list of such objects."""

    def walk(schema: dict[str, Any]) -> None:
        assert "x-kubernetes-preserve-unknown-fields" not in schema
        inner = schema.get("properties", {}).values()
        for part in filter(None, (*inner, schema.get("items"), schema.get("additionalProperties"))):
            walk(part)

    walk(profile_crd(definitions())["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
    for path in ("spec.engine.podTemplate", "spec.model.volume"):
        walk(schema_of(path))
        assert "default" in schema_of(path)


@pytest.mark.parametrize(
    ("text", "is_quantity"),
    [
        *(
            (text, True)
            for text in (
                "0",
                "1",
                "-1",
                "+0.5",
                "1.",
                ".5",
                "100m",
                "1Gi",
                "5n",
                "2u",
                "3k",
                "1e3",
                "2E-3",
                "4E",
            )
        ),
        *(
            (text, False)
            for text in ("", " ", ".", "1 Gi", "1gi", "1KB", "m", "1..2", "1e", "1,5", "0x10", "1Gi\n")
        ),
    ],
)
def test_definition_refuses_amounts_that_are_no_quantity(text: str, is_quantity: bool) -> None:
    """Otherwise the API server refuses the StatefulSet, and names no field."""
    for path in ("spec.engine.resources", "spec.tiers.remote.managed.resources"):
        amount = schema_of(path)["properties"]["limits"]["additionalProperties"]
        assert bool(re.search(amount["pattern"].replace("$", r"\Z"), text)) is is_quantity


def schema_of(path: str) -> dict[str, Any]:
    schema = crd(definitions())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for name in path.split("."):
        schema = schema["properties"][name]
    return dict(schema)


def test_every_field_has_a_description() -> None:
    def check(cls: Any) -> None:
        for declared_field in cls.FIELDS:
            assert declared_field.description.endswith("."), declared_field.name
            if is_part(declared_field.type):
                check(declared_field.type)

    check(Spec)
    check(Status)


@pytest.mark.parametrize(
    ("text", "amount"),
    [("64Gi", 64 * 2**30), ("500m", "0.5"), (2, 2), ("1.5k", 1500), ("1e3", 1000), ("12E", 12 * 10**18)],
)
def test_parse_quantity_returns_amount(text: str | int, amount: int | str) -> None:
    assert parse_quantity(text) == Decimal(amount)


@pytest.mark.parametrize("text", ["", "Gi", "1GiB", "1 Gi", "0x10", "--1", "1e999"])
def test_parse_quantity_refuses_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)
    assert not quantity_equal(text, text)


@given(st.integers(1, 2**50))
def test_format_mebibytes_rounds_up(num_bytes: int) -> None:
    assert 0 <= parse_quantity(format_mebibytes(num_bytes)) - num_bytes < 2**20
