"""What an operator of a later version may say to the images of earlier ones.

Clusters keep the images they were made with, and the present operator renders their pods: whatever it says in
them is read by an older sidecar, client and engine. An option that one of those does not know is a crash
loop, or an engine without its cache. So the sets here only ever shrink. What a later version needs goes into
the sidecar's ConfigMap, where unknown keys are ignored with a warning.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.specs.names import STOCK_IMAGES
from lmcache_sidecar.config import read

from tests.harness.operator_model import cluster

SIDECAR_ARGS = {"serve", "--config", "--memory-size"}
ENGINE_ARGS = {
    "--kv-transfer-config", "--pipeline-parallel-size", "--port", "--prefix-caching-hash-algo", "--revision",
    "--served-model-name", "--shutdown-timeout", "--tensor-parallel-size",
}  # fmt: skip
CLIENT_SETTINGS = {"lmcache.chunk_tokens", "lmcache.kv_cache_layout", "lmcache.socket"}
FULL: dict[str, Any] = {
    "model": {"revision": "main"},
    "sidecar": {"transfer": "SharedMemory"},
    "tiers": {
        "memory": {"size": "1Gi"}, "disk": {"size": "20Gi"}, "admit": "OnReuse",
        "remote": {"external": {"url": "redis://h:1", "authSecretRef": {"name": "a", "usernameKey": "u"}}},
    },
}  # fmt: skip


def rendered(kind: str) -> Any:
    objects = Engine().render(parse(cluster(**FULL)), Context(STOCK_IMAGES))
    return next(found for found in objects if found["kind"] == kind)


def container(name: str) -> Any:
    pod = rendered("StatefulSet")["spec"]["template"]["spec"]
    return next(c for c in [*pod["initContainers"], *pod["containers"]] if c["name"] == name)


def test_sidecars_of_earlier_versions_know_all_their_arguments() -> None:
    sidecar = container("sidecar")
    assert {arg.partition("=")[0] for arg in sidecar["args"]} == SIDECAR_ARGS
    assert "command" not in sidecar
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_payloads_of_earlier_versions_are_where_they_are_copied_from() -> None:
    assert container("payload")["command"] == ["cp", "-r", "/opt/lmcache/payload/.", "/opt/lmcache/client"]


def test_engines_and_clients_of_earlier_versions_know_all_their_arguments() -> None:
    _, *args = container("engine")["args"]
    given = dict(arg.split("=", 1) for arg in args)
    assert given.keys() == ENGINE_ARGS
    transfer = json.loads(given["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"].keys() == CLIENT_SETTINGS
    assert transfer["kv_connector_module_path"] == "lmcache.engines.vllm.connector"


def test_a_sidecar_runs_with_the_settings_of_a_later_operator(tmp_path: Any) -> None:
    later = yaml.safe_load(rendered("ConfigMap")["data"]["sidecar.yaml"])
    later |= {"tenants": {"quota": [1, {"share": 0.5}]}, "log_color": None}
    later = {key: value for key, value in later.items() if not re.search("remote_(user|pass)", key)}
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(later))
    reading = read({"config": str(file)}, {})
    assert reading.usable().admit == "OnReuse"
    assert [re.findall("key '(.*)' is unknown, and ignored", text) for text in reading.warnings] == [
        ["log_color"], ["tenants"],
    ]  # fmt: skip
