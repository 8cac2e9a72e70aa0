"""Other programs in the place of an engine's ``vllm``, out of ConfigMaps."""

from __future__ import annotations

from collections.abc import Collection

from testing.node.app import NAMESPACE

IDLE = """#!/bin/sh
mkdir -p "$HOME/www" && echo ok >"$HOME/www/health"
python -m http.server 8000 -d "$HOME/www" &
trap "kill $!" TERM
wait
"""
"""It only says that it is healthy, and is up in a second."""
_DIRECTORY = "/opt/test"


def offer_programs(node, name: str, **files: str) -> None:
    """A ConfigMap of them, for pods of LMCacheClusters."""
    node.api.create("v1/configmaps", {"metadata": {"name": name}, "data": files}, NAMESPACE)


def use_program(app, name: str, program: str, modules: Collection[str] = ()) -> None:
    """Have the app's engine be that file of a ConfigMap, with modules of `testing.engine` from there."""
    template = app.spec["spec"]["engine"]["podTemplate"]["spec"]
    (container,) = template["containers"]
    venv = next(mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "venv")
    path = f"{_DIRECTORY}/bin:{venv}/bin:/usr/local/bin:/usr/bin:/bin"
    container["env"].append({"name": "PATH", "value": path})
    container["volumeMounts"].append({"name": name, "mountPath": _DIRECTORY})
    items = [{"key": f"{module}.py", "path": f"testing/engine/{module}.py"} for module in modules]
    items.append({"key": program, "path": "bin/vllm", "mode": 0o555})
    template["volumes"].append({"name": name, "configMap": {"name": name, "items": items}})
