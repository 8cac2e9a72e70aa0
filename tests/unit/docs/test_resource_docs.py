"""The reference of the resource: its examples are valid, and every field has an example."""

import copy
from typing import Any

import yaml

from lmcache_operator.api.parse import parse
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context, Probed
from lmcache_operator.reconcile.probe import read_sidecar
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.plans import settled_world, status_of
from tools import resource_docs
from tools.resource_docs import COMPLETE, CONDITIONS


def test_page_describes_fields_before_it_shows_an_object_of_all() -> None:
    page = resource_docs.render()
    assert 0 < page.index("| `model` |") < page.index(COMPLETE)


def test_field_that_turns_blending_on_calls_its_answers_approximate() -> None:
    (row,) = (line for line in resource_docs.render().splitlines() if line.startswith("| `blend` |"))
    assert "approximate" in row


def test_complete_example_can_be_rendered() -> None:
    cluster = parse(yaml.safe_load(COMPLETE))
    for component in COMPONENTS:
        component.render(cluster, Context(STOCK_IMAGES))


def test_each_example_is_accepted_alone() -> None:
    resource = yaml.safe_load(COMPLETE)
    for path, value in resource_docs.examples().items():
        *parents, name = path.split(".")
        changed: Any = copy.deepcopy(resource)
        remote, part = changed["spec"]["tiers"]["remote"], changed
        if parents[1:] == ["autoscaling", "remote"]:
            remote.clear()
            remote["managed"] = {"memoryPerShard": "1Gi", "shards": 2}
            changed["spec"]["autoscaling"]["remote"] = {"maxShards": 4}
        elif "remote" in parents and not {"external", "encryption"} & {*parents}:
            remote.clear()
            remote |= {"managed": {"memoryPerShard": "1Gi"}} if "managed" in parents else {}
        elif parents[-2:] == ["tls", "secretRef"]:
            del changed["spec"]["tiers"]["peers"]["tls"]["issuerRef"]
        elif path == "spec.tenants.header":
            del changed["spec"]["engine"]["prefill"]
            changed["spec"]["router"]["policy"] = "PowerOfTwo"
        elif name in ("nodes", "topologyKey"):
            del changed["spec"]["engine"]["prefill"]
            changed["spec"]["engine"] |= {"nodes": 2, "parallelism": {"tensor": 8, "data": 2}}
        elif parents[-1] == "blend":
            del changed["spec"]["engine"]["prefill"]
            changed["spec"]["engine"]["parallelism"] = {"tensor": 8}
        for parent in parents:
            if parent.endswith("[]"):
                part = part[parent.removesuffix("[]")][0]
            else:
                part = part.setdefault(parent, {"name": "a"} if parent == "issuerRef" else {})
        part[name] = value
        if name == "resourceName":
            del part["deviceClassName"]
        if name == "saltHash":
            del part["saltSecretRef"]
        parse(changed)


def test_all_conditions_are_documented() -> None:
    keys, token = {"secretRef": {"name": "kv-keys"}}, {"httpAuthentication": "Token"}
    world = settled_world(tiers={"disk": {"size": "1Gi", "encryption": keys}}, tenants={}, sidecar=token)
    stats = {
        "is_ready": True,
        "num_clients": {"attached": 1},
        "private_reason": "",
        "disk": {"is_reachable": True, "encryption_problem": ""},
        "remote": {"is_reachable": True},
        "transfer": {"pinned_bytes": {"engine": 1}},
        "http_authentication": "Token",
        "tenants": {"tenants_problem": "", "tenants_digest": ""},
    }
    sidecar = read_sidecar(stats)._replace(pod="demo-engine-0")
    status = status_of(world, probed=Probed((sidecar,), True))
    tested_elsewhere = {"AutoscalingActive", "PrefillAvailable", "RemoteTierAvailable", "RouterAvailable"}
    assert {condition["type"] for condition in status["conditions"]} == set(CONDITIONS) - tested_elsewhere
