"""`lmcache-operator inject` on files of users: injected objects, remarks and errors."""

import copy
import re
from typing import Any

import pytest
import yaml

from lmcache_operator.__main__ import main
from lmcache_operator.api.documents import dump, load
from lmcache_operator.components.injection.workloads import inject_objects
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs.names import INJECT_LABEL
from tests.harness.operator.injection import CONTEXT, deployment, injected, outcome, pod
from tests.harness.operator.model import UID, cluster
from tests.harness.operator.render import part
from tools.kube import schemas


def deployment_of(engine: dict[str, Any]) -> dict[str, Any]:
    """A Deployment that requests the cache, with its container changed."""
    changed = deployment()
    changed["spec"]["template"]["spec"]["containers"][0] |= engine
    return changed


def unlabelled(**engine: Any) -> dict[str, Any]:
    """The same without the label that requests a cache."""
    changed = copy.deepcopy(deployment_of(engine))
    del changed["spec"]["template"]["metadata"]["labels"][INJECT_LABEL]
    return changed


def test_inject_changes_only_labelled_pods() -> None:
    service = {"kind": "Service", "metadata": {"name": "llm"}}
    results = injected(service, unlabelled(), deployment())
    assert results[:2] == [service, unlabelled()]
    assert results[2] != deployment()
    named = injected(unlabelled(), name="demo")[0]
    assert (named["spec"]["template"]["metadata"]["labels"][INJECT_LABEL], named) == ("demo", results[2])


def test_load_keeps_yaml_1_1_words_as_strings() -> None:
    assert load("[1:30, 1:30.5, =, 2001-01-01, 12, 1.5]") == [["1:30", "1:30.5", "=", "2001-01-01", 12, 1.5]]


def test_load_repeats_what_an_alias_names() -> None:
    assert load("[&a {x: &b [1]}, {<<: *a, y: *b}]\n---\n[&a 1, *a]") == [
        [{"x": [1]}, {"x": [1], "y": [1]}],
        [1, 1],
    ]


def test_inject_unpacks_a_list_of_kubectl() -> None:
    listed = {"kind": "List", "items": [deployment(), {"kind": "Service"}]}
    assert injected(listed) == injected(deployment(), {"kind": "Service"})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (
            {"kind": "LeaderWorkerSet"},
            "it restarts a whole engine when a sidecar restarts: instead, set spec.eng",
        ),
        ({"kind": "RayService"}, "its engines have several pods: instead, set spec.engine.nodes"),
        ({"kind": "Pod"}, "Pod None.spec: must be an object, not None"),
        ({"kind": "Job", "metadata": {"name": "x"}, "spec": []}, "Job x: spec.template: must be an object"),
        (deployment(containers=[]), "spec.containers: annotation lmcache.io/container must name"),
        (deployment(containers=[{"image": "x"}]), "spec.template.spec.containers[0].name: must be a string"),
        (deployment(volumes=[7]), "spec.template.spec.volumes[0]: must be an object, not 7"),
        (pod(args="--x"), "Pod llm.spec.containers[0].args: must be a list, not '--x'"),
        (pod(args=[7]), "spec.containers[0].args[0]: must be a string, not 7"),
        ({"kind": "Service"}, "lmcache.io/inject: no pod has this label: add it, or use --name"),
        ("text", "lmcache.io/inject: no pod has this label"),
        (None, "lmcache.io/inject: no pod has this label"),
        (pod(name="other"), f"metadata.labels[{INJECT_LABEL}]: there is no LMCacheCluster other: give its"),
    ],
)
def test_inject_refuses_unusable_documents_with_a_reason(document: Any, message: str) -> None:
    with pytest.raises(InvalidSpecError, match=re.escape(message)):
        injected(document)


def test_inject_refuses_a_cluster_of_another_namespace() -> None:
    workload = deployment()
    workload["metadata"]["namespace"] = "elsewhere"
    resource = cluster()
    resource["metadata"]["namespace"] = "here"
    with pytest.raises(InvalidSpecError, match="LMCacheCluster demo is in another namespace, here"):
        inject_objects([workload], [resource], None, CONTEXT)
    resource["metadata"]["namespace"] = "elsewhere"
    assert inject_objects([workload], [resource], None, CONTEXT).objects != [workload]


TOKEN = {"sidecar": {"httpAuthentication": "Token"}}
MANAGED = {"tiers": {"remote": {"managed": {"memoryPerShard": "1Gi"}}}}
REFERENCE = {"tiers": {"remote": {"clusterRef": {"name": "kv"}}}}


@pytest.mark.parametrize(("changes", "owner"), [(TOKEN, "demo"), (MANAGED, "demo"), (REFERENCE, "kv")])
def test_inject_needs_the_uids_that_are_in_the_names_of_secrets(changes: dict[str, Any], owner: str) -> None:
    """An object in a file has no uid until the API server stores it."""
    stored, other = cluster(**changes), cluster(**MANAGED)
    other["metadata"] |= {"name": "kv", "uid": "uid-of-kv"}
    uid = {"demo": UID, "kv": "uid-of-kv"}[owner]
    objects = inject_objects([deployment()], [other, stored], None, CONTEXT).objects
    assert f"{owner}-{'pages' if changes == TOKEN else 'remote'}-{uid}" in str(objects)
    del (stored if owner == "demo" else other)["metadata"]["uid"]
    for files in ([other, stored], [stored]):
        with pytest.raises(InvalidSpecError, match=f"{owner}: is missing, .*kubectl get lmcluster {owner}"):
            inject_objects([deployment()], files, None, CONTEXT)


def test_cluster_may_refer_to_one_of_another_file() -> None:
    stored, other = cluster(**REFERENCE), cluster(**MANAGED)
    other["metadata"] |= {"name": "kv", "uid": "uid-of-kv"}
    for first, second in (stored, other), (other, stored):
        objects = inject_objects([deployment(), first], [second], None, CONTEXT).objects
        assert "kv-remote-uid-of-kv" in str(objects)


def test_missing_namespace_matches_the_cluster_that_is_referred_to_in_any() -> None:
    stored, other, former = cluster(**REFERENCE), cluster(**MANAGED), cluster(**MANAGED)
    del stored["metadata"]["namespace"]
    other["metadata"] |= {"name": "kv", "uid": "uid-of-kv"}
    former["metadata"] |= {"name": "kv", "uid": "former", "namespace": "elsewhere"}
    assert "kv-remote-uid-of-kv" in str(inject_objects([deployment()], [other, stored], None, CONTEXT))
    stored["metadata"]["namespace"] = other["metadata"]["namespace"]
    assert "kv-remote-uid-of-kv" in str(
        inject_objects([deployment()], [other, former, stored], None, CONTEXT)
    )
    with pytest.raises(InvalidSpecError, match="kv: is missing"):
        inject_objects([deployment()], [former, stored], None, CONTEXT)
    del former["metadata"]["namespace"]
    assert "kv-remote-uid-of-kv" in str(
        inject_objects([deployment()], [other, former, stored], None, CONTEXT)
    )


def test_inject_command_reads_files_and_prints_objects(tmp_path, capsys):
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
def test_dump_preserves_what_load_read(document: str) -> None:
    assert (load(dump(load(document))), load("2026-01-02")) == (load(document), ["2026-01-02"])


def test_kubernetes_reads_dumped_strings_unchanged() -> None:
    """Strings must stay strings: YAML readers of Kubernetes and Python disagree on numbers and booleans."""
    text = "1e3 123e4 1234e56 +1e3 .5e3 -0o17 0o17 0x1F 0b1 1_0 y N yes null ~ 010 1:30 2026-1-2 2026-01-02"
    words = [*text.split(), ".inf", "-.INF", ".nan", "=", "<<", "0.", ""]
    data = {f"k{index}": word for index, word in enumerate(words)}
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "1e3"}, "data": data}
    assert (schemas.validate(dump([config_map])), load(dump([config_map]))) == ([], [config_map])


def test_pod_gets_the_cache_of_its_own_namespace() -> None:
    objects = []
    for namespace, size in (("a", "1Gi"), ("b", "2Gi")):
        manifest = cluster(tiers={"memory": {"size": size}})
        objects.append(manifest | {"metadata": manifest["metadata"] | {"namespace": namespace}})
        objects.append(deployment() | {"metadata": {"name": "llm", "namespace": namespace}})
    _, first, _, second = inject_objects(objects, [], None, CONTEXT).objects
    volumes = (manifest["spec"]["template"]["spec"]["volumes"] for manifest in (first, second))
    arenas = [part(each, "lmcache-arena")["emptyDir"]["sizeLimit"] for each in volumes]
    assert arenas == ["1024Mi", "2048Mi"]


def test_inject_reads_a_list_of_kubectl() -> None:
    listed = {"kind": "List", "items": [cluster()]}
    assert inject_objects([deployment()], [listed], None, CONTEXT) == outcome(deployment())


ENGINE_IMAGES = (
    "vllm/vllm-openai:v0.32.0", "rocm/vllm", "host:5000/a/vllm@sha256:0", "vllm-cpu-release-repo:v1",
    "lmsysorg/sglang:v0.5.23", "host:5000/a/sglang@sha256:0", "lmsysorg/sglang-rocm:v0.5.23",
)  # fmt: skip
OTHER_IMAGES = (
    "redis:7", "vllm/router:v1", "x/vllm-router", "host:5000/my-vllm", "vllm/redis",
    "lmsysorg/sglang-router:v1",
)  # fmt: skip
PYTHON = {"image": "mine", "command": ["python3", "-m"]}
ENGINES: list[dict[str, Any]] = [
    *({"image": image} for image in ENGINE_IMAGES),
    {"image": "mine", "command": ["/opt/bin/vllm", "serve"]},
    {"image": "mine", "args": ["vllm", "serve", "m"]},
    {"image": "mine", "args": ["/opt/bin/sglang", "serve", "m"]},
    PYTHON | {"args": ["vllm.entrypoints.openai.api_server", "--port=80"]},
    PYTHON | {"args": ["sglang.launch_server", "--port=80"]},
]
NON_ENGINES: list[dict[str, Any]] = [
    *({"image": image} for image in OTHER_IMAGES),
    {"image": "redis", "args": ["--appendonly", "yes"]},
    {"image": "router", "args": ["--backend", "http://vllm:8000", "--log=/var/log/vllm"]},
    {"image": "vllm/vllm-openai", "command": ["python3", "bench.py"]},
    {"image": "lmsysorg/sglang", "command": ["python3", "-m", "sglang.bench_serving"]},
    {"image": "router", "args": ["--backend", "http://sglang:30000", "sglang"]},
]


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_name_option_injects_into_unlabelled_engine_pods(engine: dict[str, Any]) -> None:
    redis = unlabelled(image="redis:7", args=["--appendonly", "yes"])
    result = outcome(unlabelled(**engine), redis, name="demo")
    assert result.objects == [injected(deployment_of(engine))[0], redis]
    injected_remark, unchanged_remark = result.remarks
    assert injected_remark == "Deployment llm: has the cache of demo"
    assert "left unchanged, no container certainly runs vLLM or SGLang: if one does" in unchanged_remark


@pytest.mark.parametrize("container", NON_ENGINES, ids=str)
def test_name_option_refuses_unlabelled_pods_without_engine(container: dict[str, Any]) -> None:
    with pytest.raises(InvalidSpecError, match="certainly runs vLLM or SGLang: if one does, label the pods"):
        injected(unlabelled(**container), name="demo")
    if "command" not in container:
        assert injected(deployment_of(container)) != [deployment_of(container)]


def test_name_option_accepts_pods_whose_annotation_names_the_engine() -> None:
    workload = unlabelled(image="mine")
    workload["spec"]["template"]["metadata"]["annotations"] = {"lmcache.io/container": "vllm"}
    assert injected(workload, name="demo") != [workload]


def test_inject_error_names_the_file_with_the_mistake(tmp_path, capsys):
    workload, resource = tmp_path / "deployment.yaml", tmp_path / "cluster.yaml"
    for objects, clusters, named_file in (
        (dump([pod(args=[7])]), dump([cluster()]), workload),
        ("a: [", dump([cluster()]), workload),
        (dump([deployment()]), dump([cluster() | {"spec": 7}]), resource),
        (dump([deployment()]), "a: [", resource),
        (dump([deployment()]), None, resource),
    ):
        workload.write_text(objects)
        resource.unlink() if clusters is None else resource.write_text(clusters)
        assert main(["inject", "-f", str(workload), "--cluster", str(resource)]) == 2
        assert capsys.readouterr().err.startswith(f"{named_file}: ")
