"""Adds the cache to somebody's pod, or says why not. Pure.

The chart's MutatingAdmissionPolicy does the same inside the API server, in CEL, with the same sentences
(``templates/injection.yaml``); a test compares the two. What is seen in the pod that could make the API
server refuse it, or its engine fail to start, keeps the cache out of it: the pod is its owner's, and more to
him than a cache.
"""

from __future__ import annotations

import re

from lmcache_operator.components.injection.profile import ONE_POD, PREFIX, RESERVED_ARGS, SIDECAR
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object, names

CONTAINER = "lmcache.io/container"
"""Annotation: which of several containers is the engine."""
OUTCOME = "lmcache.io/injection"
"""Annotation: what came of the label."""
INJECTED = "injected"
_SHELL = r"(.*/)?(sh|bash|dash|ash|ksh|zsh)|.*\.sh|.*vllm serve .*"
_STARTS_VLLM = r"(.*bin/)?vllm|vllm\.entrypoints\..*|.*\bvllm serve\b.*"
_VLLM_IMAGE = r"(.*/)?vllm(-(openai|cpu|cuda|rocm|tpu|xpu|hpu|neuron|ascend|dev)[^/:@]*)?([:@].*)?"
"""Those that are published; a router's is named after vLLM, too."""
_OTHER_EXECUTOR = r"(^|\n)--dis[a-z_-]*[=\n](ray|external_launcher)(\n|$)"
_EXECUTOR_SENTENCE = f"--distributed-executor-backend can't be ray or external_launcher: {ONE_POD}"
_RANK_VARIABLES = "VLLM_DP_"
_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/name"
_USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot")


def has_cache(pod: Object) -> bool:
    """Whether a pod, or a pod template, has been given its cache."""
    return any(container.get("name") == SIDECAR for container in pod["spec"].get("initContainers") or ())


def has_engine(pod: Object) -> bool:
    """Whether a pod, or a pod template, is one of vLLM for certain: by its command, or its image's name."""
    return CONTAINER in ((pod.get("metadata") or {}).get("annotations") or {}) or any(
        _starts_vllm(container) for container in pod["spec"]["containers"]
    )


def _starts_vllm(container: Object) -> bool:
    command, args = container.get("command") or [], container.get("args") or []
    if any(re.fullmatch(_STARTS_VLLM, word, re.DOTALL) for word in command + args):
        return True
    return not command and bool(re.fullmatch(_VLLM_IMAGE, container.get("image") or ""))


def inject(pod: Object, profile: Object, path: str) -> Object:
    """The same pod, or pod template, with the cache of ``profile``; ``path`` is where it is.

    Raises:
        InvalidSpecError: it can't have one.
    """
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    annotations = metadata.get("annotations") or {}
    index = _engine_index(annotations, spec["containers"], f"{path}spec")
    engine, added = spec["containers"][index], profile["spec"]
    _check_pod(metadata, spec, f"{path}spec")
    _check_engine(engine, profile, f"{path}spec.containers[{index}]")
    containers = list(spec["containers"])
    containers[index] = _engine(engine, added["containers"][0])
    security = spec.get("securityContext") or {}
    groups = security.get("supplementalGroups") or []
    own_groups = [group for group in added["securityContext"]["supplementalGroups"] if group not in groups]
    ours = [_init_container(container, engine, added) for container in added["initContainers"]]
    return pod | {
        "metadata": metadata | {"annotations": annotations | {OUTCOME: INJECTED}},
        "spec": spec | {
            "containers": containers,
            # The sidecar first: others may take long.
            "initContainers": [*ours, *(spec.get("initContainers") or [])],
            "securityContext": security | {"supplementalGroups": [*groups, *own_groups]},
            "volumes": [*(spec.get("volumes") or []), *added["volumes"]],
        },
    }  # fmt: skip


def _engine_index(annotations: Object, containers: list[Object], path: str) -> int:
    found = [container["name"] for container in containers]
    name = annotations.get(CONTAINER, found[0] if len(found) == 1 else "")
    if name not in found:
        raise InvalidSpecError(f"{path}.containers", f"the annotation {CONTAINER} must name the engine's")
    return found.index(name)


def _engine(engine: Object, added: Object) -> Object:
    env = engine.get("env") or []
    named = [variable["name"] for variable in env]
    return engine | {
        "args": [*(engine.get("args") or []), *added["args"]],
        "env": [*env, *(variable for variable in added["env"] if variable["name"] not in named)],
        "volumeMounts": [*(engine.get("volumeMounts") or []), *added["volumeMounts"]],
    }


def _init_container(container: Object, engine: Object, added: Object) -> Object:
    """With the engine's user, and with its GPUs where they are claimed and the sidecar is to see them."""
    user = {key: value for key, value in (engine.get("securityContext") or {}).items() if key in _USER_FIELDS}
    given = container | {"securityContext": container["securityContext"] | user}
    claims = (engine.get("resources") or {}).get("claims")
    if claims and container["name"] == SIDECAR and added.get("resourceClaims"):
        given["resources"] = container["resources"] | {"claims": claims}
    return given


def _check_pod(metadata: Object, spec: Object, path: str) -> None:
    containers = [*spec["containers"], *(spec.get("initContainers") or [])]
    taken = [item["name"] for item in [*containers, *(spec.get("volumes") or [])]]
    ports = [port.get("containerPort") for each in containers for port in each.get("ports") or ()]
    if _GROUP_LABEL in (metadata.get("labels") or {}):
        raise InvalidSpecError(path, "an engine of several pods can't have a cache in this version")
    if spec.get("hostNetwork"):
        sentence = f"two such pods can't run on one node: each sidecar needs port {names.SIDECAR_PORT}"
        raise InvalidSpecError(f"{path}.hostNetwork", sentence)
    if any((spec.get("resources") or {}).values()):
        sentence = "there is none left for the sidecar: set resources for each container instead"
        raise InvalidSpecError(f"{path}.resources", sentence)
    if any(name.startswith(PREFIX) for name in taken):
        raise InvalidSpecError(path, f"names of containers and volumes with {PREFIX} are the cache's own")
    if names.SIDECAR_PORT in ports:
        raise InvalidSpecError(f"{path}.containers", f"port {names.SIDECAR_PORT} is the sidecar's")


def _check_args(engine: Object, profile: Object, path: str) -> None:
    command, args = engine.get("command") or [], engine.get("args") or []
    if not command + args:
        raise InvalidSpecError(f"{path}.args", "the image's own arguments would be lost: write them out")
    if any(re.fullmatch(_SHELL, word) for word in command + args):
        sentence = "a shell passes no arguments on: write command: [vllm, serve], and args as a list"
        raise InvalidSpecError(f"{path}.command", sentence)
    if command and not any("vllm" in word for word in command + args):
        raise InvalidSpecError(f"{path}.command", "does not start vLLM")
    text = "\n".join(command + args)
    # Options before it are those of what starts it: tini --, nice -n 5.
    text = text[text.index("vllm") :] if command else text
    flags = [_flag(word) for word in text.split("\n")]
    for line in profile["metadata"]["annotations"][RESERVED_ARGS].splitlines():
        if any(_is_option(flag, line.partition(" ")[0]) for flag in flags):
            raise InvalidSpecError(f"{path}.args", line)
    if re.search(_OTHER_EXECUTOR, text):
        raise InvalidSpecError(f"{path}.args", _EXECUTOR_SENTENCE)


def _check_engine(engine: Object, profile: Object, path: str) -> None:
    _check_args(engine, profile, path)
    for variable in engine.get("env") or ():
        if variable["name"].startswith(_RANK_VARIABLES):
            raise InvalidSpecError(f"{path}.env", f"{variable['name']} can't be set: {ONE_POD}")
    added = profile["spec"]["containers"][0]
    wanted = {variable["name"]: variable["value"] for variable in added["env"]}
    for variable in engine.get("env") or ():
        value = wanted.get(variable["name"])
        if value is not None and variable.get("value") != value:
            raise InvalidSpecError(f"{path}.env", f"{variable['name']} must be {value}, or not be set")
    paths = [mount["mountPath"] for mount in added["volumeMounts"]]
    for mount in engine.get("volumeMounts") or ():
        if mount.get("mountPath") in paths:
            raise InvalidSpecError(f"{path}.volumeMounts", f"{mount['mountPath']} is the cache's")


def _flag(word: str) -> str:
    """The option that an argument sets, of which it may have the beginning only."""
    name = re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")
    if name.startswith(("--data-parallel", "-dp")):
        return "--data-parallel-size"
    return name[:2] if re.search("^-[nr][0-9]+$", name) else name  # -n2 is -n 2


def _is_option(name: str, option: str) -> bool:
    """Whether it is this one; the engine takes the beginning of one for the whole."""
    is_beginning = name.startswith("--") and len(name) > 2 and option.startswith(name)
    return name == option or is_beginning
