"""Files of others: what `lmcache-operator inject` makes of the objects in them, and what it says."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmcache_operator.__main__ import main
from lmcache_operator.api.documents import dump, load
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL

from tests.harness.operator_injection import CONTEXT, deployment, injected, outcome, pod
from tests.harness.operator_model import cluster
from tools.kube import schemas


def without_label(found: dict[str, Any], **engine: Any) -> dict[str, Any]:
    """A Deployment whose pods ask for nothing, with its container changed."""
    found = copy.deepcopy(found)
    template = found["spec"]["template"]
    del template["metadata"]["labels"][INJECT_LABEL]
    template["spec"]["containers"][0] |= engine
    return found


def deployment_of(engine: dict[str, Any]) -> dict[str, Any]:
    """A Deployment that asks for the cache, with its container changed."""
    found = deployment()
    found["spec"]["template"]["spec"]["containers"][0] |= engine
    return found


def test_twice_is_once() -> None:
    once = injected(deployment())
    assert injected(*once) == once


def test_only_pods_that_ask_for_it_get_it_and_all_else_is_passed_on() -> None:
    service = {"kind": "Service", "metadata": {"name": "llm"}}
    other = without_label(deployment())
    found = injected(service, other, deployment())
    assert found[:2] == [service, other]
    assert found[2] != deployment()
    named = injected(other, name="demo")[0]
    assert named["spec"]["template"]["metadata"]["labels"][INJECT_LABEL] == "demo"
    assert named == found[2]


def test_what_only_old_yaml_takes_for_something_else_stays_a_string() -> None:
    assert load("[1:30, 1:30.5, =, 2001-01-01, 12, 1.5]") == [["1:30", "1:30.5", "=", "2001-01-01", 12, 1.5]]


def test_a_list_as_kubectl_prints_it_is_its_items() -> None:
    listed = {"kind": "List", "items": [deployment(), {"kind": "Service"}]}
    assert injected(listed) == injected(deployment(), {"kind": "Service"})


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"kind": "LeaderWorkerSet"}, "kind LeaderWorkerSet: engines of several pods can't have a cache"),
        ({"kind": "Pod"}, "Pod None.spec: must be an object, not None"),
        ({"kind": "Job", "metadata": {"name": "x"}, "spec": []}, "Job x: spec.template: must be an object"),
        (deployment(containers=[]), "spec.containers: the annotation lmcache.io/container must name"),
        (deployment(containers=[{"image": "x"}]), "spec.template.spec.containers[0].name: must be a string"),
        (deployment(volumes=[7]), "spec.template.spec.volumes[0]: must be an object, not 7"),
        (pod(args="--x"), "Pod llm.spec.containers[0].args: must be a list, not '--x'"),
        (pod(args=[7]), "spec.containers[0].args[0]: must be a string, not 7"),
        ({"kind": "Service"}, "lmcache.io/inject: no pod has this label: add it, or say --name"),
        ("text", "lmcache.io/inject: no pod has this label"),
        (None, "lmcache.io/inject: no pod has this label"),
        (pod(name="other"), f"metadata.labels[{INJECT_LABEL}]: there is no LMCacheCluster other: give its"),
    ],
)
def test_rubbish_is_refused_with_a_sentence(found: Any, message: str) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(message)):
        injected(found)


def test_a_cluster_of_another_namespace_is_refused() -> None:
    found = deployment()
    found["metadata"]["namespace"] = "elsewhere"
    there = cluster()
    there["metadata"]["namespace"] = "here"
    with pytest.raises(InvalidSpecError, match="LMCacheCluster demo is in another namespace, here"):
        inject_objects([found], clusters_in([there]), None, CONTEXT)
    there["metadata"]["namespace"] = "elsewhere"
    assert inject_objects([found], clusters_in([there]), None, CONTEXT).objects != [found]


def test_the_command_reads_and_prints_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, resource = tmp_path / "deployment.yaml", tmp_path / "cluster.yaml"
    workload.write_text(yaml.safe_dump(deployment()))
    resource.write_text(yaml.safe_dump(cluster()))
    assert main(["inject", "-f", str(workload), "--cluster", str(resource)]) == 0
    assert list(yaml.safe_load_all(capsys.readouterr().out)) == injected(deployment())
    assert main(["inject", "-f", str(workload)]) == 2
    assert "there is no LMCacheCluster demo: give its file with --cluster" in capsys.readouterr().err
    workload.write_text(yaml.safe_dump_all([cluster(), deployment()]))
    assert main(["inject", "-f", str(workload)]) == 0
    assert "lmcache-sidecar" in capsys.readouterr().out


@pytest.mark.parametrize("document", ["a: 2026-01-02", "a: '1e3'", "'1e3': b"])
def test_what_it_reads_it_writes_as_it_was(document: str) -> None:
    assert load(dump(load(document))) == load(document)
    assert load("2026-01-02") == ["2026-01-02"]


def test_what_it_writes_kubernetes_reads_as_the_same() -> None:
    """A string stays one: its YAML reads other words as numbers and booleans than Python's."""
    words = [
        "1e3",
        "123e4",
        "1234e56",
        "+1e3",
        ".5e3",
        "-0o17",
        "0o17",
        "0x1F",
        "0b1",
        "1_0",
        "y",
        "N",
        "yes",
    ]
    words += [
        "null",
        "~",
        "010",
        "1:30",
        "2026-1-2",
        "2026-01-02",
        ".inf",
        "-.INF",
        ".nan",
        "=",
        "<<",
        "0.",
        "",
    ]
    data = {f"k{index}": word for index, word in enumerate(words)}
    found = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "1e3"}, "data": data}
    assert schemas.validate(dump([found])) == []
    assert load(dump([found])) == [found]


def test_of_clusters_with_one_name_a_pod_has_that_of_its_namespace() -> None:
    objects, sizes = [], {"a": "1Gi", "b": "2Gi"}
    for namespace, size in sizes.items():
        found = cluster(tiers={"memory": {"size": size}})
        objects.append(found | {"metadata": found["metadata"] | {"namespace": namespace}})
    for namespace in sizes:
        metadata = {"name": "llm", "namespace": namespace}
        objects.append(deployment() | {"metadata": metadata})
    *_, first, second = inject_objects(objects, [], None, CONTEXT).objects
    volumes = (found["spec"]["template"]["spec"]["volumes"] for found in (first, second))
    limits = [[v["emptyDir"]["sizeLimit"] for v in own if v["name"] == "lmcache-arena"] for own in volumes]
    assert limits == [["1024Mi"], ["2048Mi"]]


def test_clusters_may_be_a_list_as_kubectl_prints_it() -> None:
    listed = {"kind": "List", "items": [cluster()]}
    assert inject_objects([deployment()], clusters_in([listed]), None, CONTEXT) == outcome(deployment())


VLLM_IMAGES = (
    "vllm/vllm-openai:v0.32.0",
    "rocm/vllm",
    "host:5000/a/vllm@sha256:0",
    "vllm-cpu-release-repo:v1",
)


OTHER_IMAGES = ("redis:7", "vllm/router:v1", "x/vllm-router", "host:5000/my-vllm", "vllm/redis")


ENGINES: list[dict[str, Any]] = [
    *({"image": image} for image in VLLM_IMAGES),
    {"image": "mine", "command": ["/opt/bin/vllm", "serve"]},
    {
        "image": "mine",
        "command": ["python3", "-m"],
        "args": ["vllm.entrypoints.openai.api_server", "--port=80"],
    },
    {"image": "mine", "args": ["vllm", "serve", "m"]},
]


OTHERS: list[dict[str, Any]] = [
    *({"image": image} for image in OTHER_IMAGES),
    {"image": "redis", "args": ["--appendonly", "yes"]},
    {"image": "router", "args": ["--backend", "http://vllm:8000", "--log=/var/log/vllm"]},
    {"image": "vllm/vllm-openai", "command": ["python3", "bench.py"]},
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_name_is_for_pods_that_are_vllms_for_certain(engine: dict[str, Any]) -> None:
    other = without_label(deployment(), image="redis:7", args=["--appendonly", "yes"])
    found = outcome(without_label(deployment(), **engine), other, name="demo")
    assert found.objects == [injected(deployment_of(engine))[0], other]
    taken, left = found.remarks
    assert taken == "Deployment llm: has the cache of demo"
    assert left.startswith(
        "Deployment llm: left as it is, no container is vLLM's for certain: if one is, label"
    )


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_and_for_no_others_that_do_not_ask_themselves(other: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="is vLLM's for certain: if one is, label the pods"):
        injected(without_label(deployment(), **other), name="demo")
    if "command" not in other:
        assert injected(deployment_of(other)) != [deployment_of(other)]


def test_an_annotation_that_names_the_engine_is_certain_enough() -> None:
    found = without_label(deployment(), image="mine")
    found["spec"]["template"]["metadata"]["annotations"] = {"lmcache.io/container": "vllm"}
    assert injected(found, name="demo") != [found]


def test_a_mistake_is_blamed_on_the_file_that_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, resource = tmp_path / "deployment.yaml", tmp_path / "cluster.yaml"
    for objects, clusters, blamed in (
        (dump([pod(args=[7])]), dump([cluster()]), workload),
        ("a: [", dump([cluster()]), workload),
        (dump([deployment()]), dump([cluster() | {"spec": 7}]), resource),
        (dump([deployment()]), "a: [", resource),
        (dump([deployment()]), None, resource),
    ):
        workload.write_text(objects)
        resource.unlink() if clusters is None else resource.write_text(clusters)
        assert main(["inject", "-f", str(workload), "--cluster", str(resource)]) == 2
        assert capsys.readouterr().err.startswith(f"{blamed}: ")
