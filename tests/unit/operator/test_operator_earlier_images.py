"""Options that the operator may pass to images of earlier versions.

Clusters keep the images they were created with, and the current operator renders their pods. Older sidecars,
clients and engines read its options. An unknown option causes a crash loop, or an engine without its cache.
Therefore the sets here may only shrink. A setting of a later version goes into the sidecar's ConfigMap: the
sidecar ignores unknown keys there with a warning.
"""

import json
import re
from typing import Any

import yaml

from lmcache_sidecar.config import read
from tests.harness.operator import render as operator_render

SIDECAR_ARGS = {"serve", "--config", "--memory-size"}
ENGINE_ARGS = {
    "--kv-transfer-config", "--pipeline-parallel-size", "--port", "--prefix-caching-hash-algo", "--revision",
    "--served-model-name", "--shutdown-timeout", "--tensor-parallel-size",
}  # fmt: skip
SGLANG_ARGS = {
    "--enable-cache-report", "--enable-hierarchical-cache", "--enable-metrics", "--hicache-host-memory-mode",
    "--hicache-io-backend", "--hicache-mem-layout", "--hicache-ratio", "--hicache-storage-backend",
    "--hicache-storage-backend-extra-config", "--hicache-storage-prefetch-policy", "--hicache-write-policy",
    "--host", "--model-path", "--page-size", "--port", "--pp-size", "--revision", "--served-model-name",
    "--tp-size",
}  # fmt: skip
BACKEND_SETTINGS = {
    "backend_name", "class_name", "hicache_storage_pass_prefix_keys", "interface_v1", "lmcache.socket",
    "module_path", "prefetch_threshold",
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


def container(name: str, **changes: Any) -> Any:
    return operator_render.container(operator_render.pod_of(**FULL, **changes), name)


def test_earlier_sidecars_know_all_rendered_arguments() -> None:
    sidecar = container("sidecar")
    assert {arg.partition("=")[0] for arg in sidecar["args"]} == SIDECAR_ARGS
    assert "command" not in sidecar
    assert sidecar["livenessProbe"]["httpGet"]["path"] == "/healthz"


def test_earlier_payloads_have_the_path_that_is_copied() -> None:
    assert container("payload")["command"] == ["cp", "-r", "/opt/lmcache/payload/.", "/opt/lmcache/client"]


def test_earlier_engines_and_clients_know_all_rendered_arguments() -> None:
    _, *args = container("engine")["args"]
    options = dict(arg.split("=", 1) for arg in args)
    assert options.keys() == ENGINE_ARGS
    transfer = json.loads(options["--kv-transfer-config"])
    assert transfer["kv_connector_extra_config"].keys() == CLIENT_SETTINGS
    assert transfer["kv_connector_module_path"] == "lmcache_client.vllm.connector"


def test_earlier_sglang_engines_and_clients_know_all_rendered_arguments() -> None:
    options = dict(arg.partition("=")[::2] for arg in container("engine", engine={"kind": "SGLang"})["args"])
    assert options.keys() == SGLANG_ARGS
    config = json.loads(options["--hicache-storage-backend-extra-config"])
    assert (config.keys(), config["module_path"]) == (BACKEND_SETTINGS, "lmcache_client.sglang.backend")


def test_sidecar_ignores_unknown_settings_of_a_later_operator(tmp_path: Any) -> None:
    later = yaml.safe_load(operator_render.child_of("ConfigMap", **FULL)["data"]["sidecar.yaml"])
    later |= {"tenants": {"quota": [1, {"share": 0.5}]}, "log_color": None}
    later = {key: value for key, value in later.items() if not re.search("remote_(user|pass)", key)}
    file = tmp_path / "sidecar.yaml"
    file.write_text(yaml.safe_dump(later))
    reading = read({"config": str(file)}, {})
    assert reading.usable().admit == "OnReuse"
    assert [re.findall("key '(.*)' is unknown, and ignored", text) for text in reading.warnings] == [
        ["log_color"], ["tenants"],
    ]  # fmt: skip
