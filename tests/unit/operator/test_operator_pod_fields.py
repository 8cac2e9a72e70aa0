"""Fields of the spec in messages about pods that do not start."""

import pytest

from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.placement import unplaced_message
from lmcache_operator.pods.pods import pod_problems
from lmcache_operator.specs import Object
from tests.harness.operator.model import World
from tests.harness.operator.plans import observe, settled_world

_MODEL = " (spec.model.name is Qwen/Qwem): "
POD, NOW = "demo-engine-0", "2025-12-31T23:59:00Z"


def problems(world: World) -> list[Problem]:
    return list(pod_problems(observe(world)))


@pytest.mark.parametrize(
    ("component", "container", "field"),
    [
        ("engine", "engine", " (spec.engine.image)"), ("engine", "sidecar", " (spec.sidecar.image)"),
        ("engine", "payload", " (spec.sidecar.image)"), ("engine", "more", ""),
        ("remote", "remote", " (spec.tiers.remote.managed.image)"),
        ("router", "router", " (spec.router.image)"), ("", "engine", ""),
    ],
)  # fmt: skip
def test_image_that_cannot_be_pulled_is_named_with_its_field(
    component: str, container: str, field: str
) -> None:
    waiting = {"waiting": {"reason": "ErrImagePull", "message": "why"}}
    world = settled_world()
    world.pods[POD]["status"] = {"containerStatuses": [{"name": container, "state": waiting}]}
    world.pods[POD]["metadata"]["labels"]["lmcache.io/component"] = component
    message = f"pod {POD}, container {container}{field}: ErrImagePull: why"
    assert problems(world) == [Problem("ImagePullBackOff", message)]


@pytest.mark.parametrize(
    ("output", "field"),
    [
        ("Value error, Invalid repository ID or local directory specified: '/modles'.", _MODEL),
        ("huggingface_hub.errors.RepositoryNotFoundError: 404 Client Error.", _MODEL),
        ("huggingface_hub.errors.HFValidationError: Repo id must be in the form 'namespace/name'", _MODEL),
        ("OSError: x is not a local folder and is not a valid model identifier listed on", _MODEL),
        ("ValueError: Non-MoE models do not support external data parallel mode. For external",
         " (spec.engine.parallelism.data: set 1 for a dense model, or replicas instead of nodes): "),
        ("ValueError: No available memory for the cache blocks.", "engine: ended"),
    ],
)  # fmt: skip
def test_model_that_does_not_exist_or_fit_is_named_with_its_field(output: str, field: str) -> None:
    crash = {"exitCode": 1, "reason": "Error", "message": output, "finishedAt": NOW}
    world = settled_world()
    engine = {"name": "engine", "state": {"terminated": crash}, "restartCount": 2, "ready": False}
    world.pods[POD]["status"] = {"containerStatuses": [engine]}
    world.change(model={"name": "Qwen/Qwem"})
    (problem,) = problems(world)
    assert field in problem.message


@pytest.mark.parametrize(
    ("spec", "named", "what"),
    [
        ({"tiers": {"remote": {"external": {"url": "redis://h", "authSecretRef": {"name": "kv"}}}}},
         'MountVolume.SetUp failed for volume "remote-auth" : secret "kv" not found',
         "Secret kv (spec.tiers.remote.external.authSecretRef.name)"),
        ({"tiers": {"remote": {"managed": {"tls": {"secretRef": {"name": "ca"}}}}}}, 'secret "ca" not found',
         "Secret ca (spec.tiers.remote.managed.tls.secretRef.name)"),
        ({"model": {"name": "m", "tokenSecretRef": {"name": "hf", "key": "t"}}}, 'secret "hf" not found',
         "Secret hf (spec.model.tokenSecretRef.name)"),
        ({"model": {"name": "m", "volume": {"secret": {"secretName": "m"}}}}, 'secret "m" not found',
         "Secret m (spec.model.volume.secret.secretName)"),
        ({"model": {"name": "m", "volume": {"configMap": {"name": "m"}}}}, 'configmap "m" not found',
         "ConfigMap m (spec.model.volume.configMap.name)"),
        ({"model": {"name": "m", "volume": {"persistentVolumeClaim": {"claimName": "modells"}}}},
         '0/1 nodes are available: persistentvolumeclaim "modells" not found. not found',
         "PersistentVolumeClaim modells (spec.model.volume.persistentVolumeClaim.claimName)"),
    ],
)  # fmt: skip
def test_object_that_does_not_exist_is_named_with_its_field(spec: Object, named: str, what: str) -> None:
    world = settled_world()
    world.change(**spec)
    advice = "does not exist in namespace team: create it, or correct the name"
    live = world.pods[POD]
    if "nodes" in named:
        placed = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": named}
        live["status"] = {"conditions": [placed]}
        assert problems(world) == [Problem("Unschedulable", f"pod {POD}: {what} {advice}")]
        other = named.replace("modells", "scratch")  # of the pod template
        text = unplaced_message(live, other, observe(world))
        assert text == f"pod {POD}: {other.removesuffix(' not found')}"
        return
    live["status"] = {}
    event = {"reason": "FailedMount", "message": named, "lastTimestamp": NOW}
    world.warnings = [event | {"involvedObject": {"uid": live["metadata"]["uid"]}}]
    assert problems(world) == [Problem("FailedMount", f"pod {POD}: {what} {advice}")]
