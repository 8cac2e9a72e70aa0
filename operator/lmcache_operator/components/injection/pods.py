"""Injects the cache into a user's pod, or explains why it can't. Pure.

The chart's MutatingAdmissionPolicy does the same inside the API server, in CEL, with the same messages
(``templates/injection.yaml``); a test compares the two. The pod matters more to its owner than a cache. So a
pod stays without a cache if injection could make the API server reject it, or its engine fail to start.
"""

from __future__ import annotations

import re

from lmcache_operator.components.engine.kinds import KINDS, kind_in
from lmcache_operator.components.engine.kinds.base import ONE_INJECTED_POD, EngineKind, option_name, words_of
from lmcache_operator.components.injection.profile import PREFIX, SIDECAR
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.specs import Object, names

CONTAINER = "lmcache.io/container"
"""Annotation: the name of the engine's container, needed in pods with several containers."""
OUTCOME = "lmcache.io/injection"
"""Annotation: the outcome of the injection."""
INJECTED = "injected"
_COMMANDS = "|".join(re.escape(command) for kind in KINDS for command in kind.shell_commands)
_SHELL = rf"(.*/)?(sh|bash|dash|ash|ksh|zsh)|.*\.sh|.*({_COMMANDS}) .*"
_LISTS = " or ".join(f"[{', '.join(kind.shell_commands[0].split())}]" for kind in KINDS)
_SHELL_SENTENCE = f"a shell does not pass arguments on: write command: {_LISTS}, and args as a list"
_OTHER_EXECUTOR = r"(^|\n)--dis[a-z_-]*[=\n](ray|external_launcher)(\n|$)"
_EXECUTOR_SENTENCE = f"--distributed-executor-backend can't be ray or external_launcher: {ONE_INJECTED_POD}"
_RANK_VARIABLES = "VLLM_DP_"
_GROUP_LABEL = "leaderworkerset.sigs.k8s.io/name"
_USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot")


def has_cache(pod: Object) -> bool:
    """Whether the cache was injected into a pod or a pod template."""
    return any(container.get("name") == SIDECAR for container in pod["spec"].get("initContainers") or ())


def has_engine(pod: Object) -> bool:
    """Whether a pod or a pod template certainly runs an engine, by its annotation, command or image name."""
    return CONTAINER in ((pod.get("metadata") or {}).get("annotations") or {}) or any(
        kind.is_mentioned(container) for container in pod["spec"]["containers"] for kind in KINDS
    )


def inject(pod: Object, profile: Object, path: str) -> Object:
    """Inject the cache of ``profile`` into a pod or a pod template. ``path``: its place, for messages.

    Raises:
        InvalidSpecError: the cache can't be injected.
    """
    metadata, spec = pod.get("metadata") or {}, pod["spec"]
    annotations = metadata.get("annotations") or {}
    index = _engine_index(annotations, spec["containers"], f"{path}spec")
    engine, added = spec["containers"][index], profile["spec"]
    _check_pod(metadata, spec, f"{path}spec")
    kind, flags = _checked_args(engine, profile, f"{path}spec.containers[{index}]")
    additions = added["containers"][KINDS.index(kind)]
    _check_engine(engine, additions, f"{path}spec.containers[{index}]")
    containers = list(spec["containers"])
    containers[index] = _engine(engine, additions, flags)
    security = spec.get("securityContext") or {}
    groups = security.get("supplementalGroups") or []
    new_groups = [group for group in added["securityContext"]["supplementalGroups"] if group not in groups]
    init_containers = [_init_container(container, engine, added) for container in added["initContainers"]]
    return pod | {
        "metadata": metadata | {"annotations": annotations | {OUTCOME: INJECTED}},
        "spec": spec | {
            "containers": containers,
            # The sidecar starts first, because the user's init containers may take long.
            "initContainers": [*init_containers, *(spec.get("initContainers") or [])],
            "securityContext": security | {"supplementalGroups": [*groups, *new_groups]},
            "volumes": [*(spec.get("volumes") or []), *added["volumes"]],
        },
    }  # fmt: skip


def _engine_index(annotations: Object, containers: list[Object], path: str) -> int:
    known = [container["name"] for container in containers]
    name = annotations.get(CONTAINER, known[0] if len(known) == 1 else "")
    if name not in known:
        raise InvalidSpecError(f"{path}.containers", f"annotation {CONTAINER} must name the engine container")
    return known.index(name)


def _engine(engine: Object, added: Object, flags: list[str]) -> Object:
    """The engine's container with the additions. Options and variables of the user take precedence."""
    env = engine.get("env") or []
    args = [arg for arg in added["args"] if not any(_is_option(flag, option_name(arg)) for flag in flags)]
    named = [variable["name"] for variable in env]
    return engine | {
        "args": [*(engine.get("args") or []), *args],
        "env": [*env, *(variable for variable in added["env"] if variable["name"] not in named)],
        "volumeMounts": [*(engine.get("volumeMounts") or []), *added["volumeMounts"]],
    }


def _init_container(container: Object, engine: Object, added: Object) -> Object:
    """An injected container with the engine's user, and for the sidecar with the engine's GPU claims."""
    user = {key: value for key, value in (engine.get("securityContext") or {}).items() if key in _USER_FIELDS}
    injected = container | {"securityContext": container["securityContext"] | user}
    claims = (engine.get("resources") or {}).get("claims")
    if claims and container["name"] == SIDECAR and added.get("resourceClaims"):
        injected["resources"] = container["resources"] | {"claims": claims}
    return injected


def _check_pod(metadata: Object, spec: Object, path: str) -> None:
    containers = [*spec["containers"], *(spec.get("initContainers") or [])]
    taken = [item["name"] for item in [*containers, *(spec.get("volumes") or [])]]
    ports = [port.get("containerPort") for each in containers for port in each.get("ports") or ()]
    if _GROUP_LABEL in (metadata.get("labels") or {}):
        raise InvalidSpecError(
            path, "an engine of several pods gets no injected cache: set spec.engine.nodes instead"
        )
    if spec.get("hostNetwork"):
        sentence = f"two such pods can't run on one node: each sidecar needs port {names.SIDECAR_PORT}"
        raise InvalidSpecError(f"{path}.hostNetwork", sentence)
    if any((spec.get("resources") or {}).values()):
        sentence = "pod-level resources leave no share for the sidecar: set resources for each container"
        raise InvalidSpecError(f"{path}.resources", sentence)
    if any(name.startswith(PREFIX) for name in taken):
        raise InvalidSpecError(path, f"names that begin with {PREFIX} are reserved for the cache")
    if names.SIDECAR_PORT in ports:
        raise InvalidSpecError(f"{path}.containers", f"port {names.SIDECAR_PORT} is reserved for the sidecar")


def _checked_args(engine: Object, profile: Object, path: str) -> tuple[EngineKind, list[str]]:
    """The kind of an engine, and the options that its arguments set."""
    command, words = engine.get("command") or [], words_of(engine)
    if not words:
        raise InvalidSpecError(f"{path}.args", "the image's own arguments would be lost: set command or args")
    if any(re.fullmatch(_SHELL, word) for word in words):
        raise InvalidSpecError(f"{path}.command", _SHELL_SENTENCE)
    kind, text = kind_in(engine), "\n".join(words)
    if kind is None:
        raise InvalidSpecError(
            f"{path}.command", f"starts neither {' nor '.join(kind.name for kind in KINDS)}"
        )
    # Options before the engine's name belong to a wrapper, such as tini -- or nice -n 5.
    if command or kind.launcher.search(text):
        text = text[text.find(kind.name.lower()) :]
    flags = [_flag(word) for word in text.split("\n")]
    for line in profile["metadata"]["annotations"][kind.reserved_annotation].splitlines():
        if any(_is_option(flag, line.partition(" ")[0]) for flag in flags):
            raise InvalidSpecError(f"{path}.args", line)
    if re.search(_OTHER_EXECUTOR, text):
        raise InvalidSpecError(f"{path}.args", _EXECUTOR_SENTENCE)
    return kind, flags


def _check_engine(engine: Object, added: Object, path: str) -> None:
    for variable in engine.get("env") or ():
        if variable["name"].startswith(_RANK_VARIABLES):
            raise InvalidSpecError(f"{path}.env", f"{variable['name']} can't be set: {ONE_INJECTED_POD}")
    wanted = {variable["name"]: variable["value"] for variable in added["env"]}
    for variable in engine.get("env") or ():
        value = wanted.get(variable["name"])
        if value is not None and variable.get("value") != value:
            raise InvalidSpecError(f"{path}.env", f"{variable['name']} must be {value}, or not be set")
    paths = [mount["mountPath"] for mount in added["volumeMounts"]]
    for mount in engine.get("volumeMounts") or ():
        if mount.get("mountPath") in paths:
            raise InvalidSpecError(f"{path}.volumeMounts", f"{mount['mountPath']} is reserved for the cache")


def _flag(word: str) -> str:
    """The option that an argument sets, possibly abbreviated."""
    name = re.split("[=.]", word, maxsplit=1)[0].replace("_", "-")
    if name == "--data-parallel-size":
        return "-dp"  # or it would count as an abbreviation of --data-parallel-size-local
    return name[:2] if re.match("-[nr][^a-z]", name) else name  # -n2 and -n+2 are -n 2


def _is_option(name: str, option: str) -> bool:
    """Whether a name is an option or its prefix, which engines accept for the option."""
    is_whole = name in ("-", "--", "-dc", "-dp")  # -dc is an option of vLLM, and no abbreviation of -dcp
    return name == option or (name.startswith("-") and not is_whole and option.startswith(name))
