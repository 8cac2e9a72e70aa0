"""Programs from ConfigMaps that replace an engine's ``vllm``."""

from collections.abc import Collection
from typing import Any

from testing.node.app import NAMESPACE

IDLE = """#!/bin/sh
mkdir -p "$HOME/www" && echo ok >"$HOME/www/health"
python -m http.server 8000 -d "$HOME/www" &
trap "kill $!" TERM
wait
"""
"""A program that starts in a second and only reports that it is healthy."""
_DIRECTORY = "/opt/test"


def offer_programs(node, name: str, **files: str) -> None:
    """Create a ConfigMap of programs for pods of LMCacheClusters."""
    node.api.create("v1/configmaps", {"metadata": {"name": name}, "data": files}, NAMESPACE)


def use_program(app, name: str, program: str, modules: Collection[str] = ()) -> None:
    """Let the app's engine run this file of a ConfigMap, with modules from there: paths below `testing`."""
    template = app.spec["spec"]["engine"]["podTemplate"]["spec"]
    (container,) = template["containers"]
    venv = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "venv")
    path = f"{_DIRECTORY}/bin:{venv}/bin:/usr/local/bin:/usr/bin:/bin"
    container["env"].append({"name": "PATH", "value": path})
    container["volumeMounts"].append({"name": name, "mountPath": _DIRECTORY})
    items: list[dict[str, Any]] = [
        {"key": module.replace("/", "-"), "path": f"testing/{module}"} for module in modules
    ]
    items.append({"key": program, "path": "bin/vllm", "mode": 0o555})
    template["volumes"].append({"name": name, "configMap": {"name": name, "items": items}})
