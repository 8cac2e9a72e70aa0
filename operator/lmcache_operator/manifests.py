"""Manifests in files: read them, and print the objects that the operator derives from them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lmcache_operator.api import KIND
from lmcache_operator.api.documents import dump, load
from lmcache_operator.api.engine_kinds import ANY_ENGINE, ENGINE_KINDS, VLLM
from lmcache_operator.api.parse import Platform
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import OTHER_ENGINES, Context
from lmcache_operator.errors import FileError, InvalidSpecError
from lmcache_operator.specs import Object
from lmcache_operator.specs.cluster_refs import with_lenders
from lmcache_operator.specs.names import ENGINE, ROUTER_IMAGE, SHARD_IMAGE, SIDECAR, STOCK_IMAGES
from lmcache_store.common.options import Parser, describe

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[Parser]

_EXIT_USAGE = 2
_OTHER_IMAGES = (
    *(
        (kind.image_flag, kind.image, f"image of the engine container if spec.engine.kind is {kind.name}")
        for kind in ENGINE_KINDS.values()
        if kind != VLLM
    ),
    ("shard", SHARD_IMAGE, "Valkey or Redis image of managed remote tiers"),
    ("router", ROUTER_IMAGE, "image of routers"),
)
"""Default images with flags, besides those of an engine pod: the flag's name, the image, and its use."""


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Convert errors in the context to `FileError` with the file's name. A FileError passes unchanged."""
    try:
        yield
    except RecursionError as error:
        raise FileError(f"{path}: is nested too deeply") from error
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, InvalidSpecError) as error:
        raise FileError(f"{path}: {error}") from error


def read_objects(path: Path) -> list[Any]:
    """Read all YAML documents of a file; "-" is standard input."""
    return load(sys.stdin.read() if str(path) == "-" else path.read_text())


def rendering_options() -> Parser:
    """Return the options that decide how objects are rendered, as a parent of other parsers."""
    rendering = Parser(add_help=False)
    for name, image in STOCK_IMAGES.items():
        about = f"default image of the {name} container (default: %(default)s)"
        rendering.add_argument(f"--{name}-image", metavar="IMAGE", default=image, help=about)
    for name, image, users in _OTHER_IMAGES:
        about = f"default {users} (default: %(default)s)"
        rendering.add_argument(f"--{name}-image", metavar="IMAGE", default=image, help=about)
    about = "namespace of the operator's pod; the operator may then reach sidecars' metrics (default: none)"
    rendering.add_argument("--operator-namespace", metavar="NAME", default="", help=about)
    about = "without a shared claim, let sidecars see all GPUs of their nodes (default: no GPUs)"
    rendering.add_argument("--allow-all-gpus-sidecar", action="store_true", help=about)
    about = "render pods without users and groups, which the platform assigns (OpenShift)"
    rendering.add_argument("--assigned-ids", action="store_true", help=about)
    about = "addresses of a pod, separated by commas: engines and routers listen in their families (IPv4)"
    rendering.add_argument("--pod-ips", metavar="IPS", default="", help=about)
    return rendering


def add_commands(commands: Commands, rendering: Parser) -> None:
    """Add the commands ``render`` and ``inject``. ``rendering``: see ``rendering_options``."""
    about = "print the objects that `run` would apply; needs no Kubernetes cluster"
    render = commands.add_parser("render", parents=[rendering], help=about)
    describe(render, about, "", "-f cluster.yaml")
    render.set_defaults(command=_print, objects=_render)
    about = "YAML file with LMCacheClusters; - for standard input"
    render.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)

    about = "inject the cache into Deployments and similar objects; needs no Kubernetes cluster"
    inject = commands.add_parser("inject", parents=[rendering], help=about)
    describe(inject, about, "", "-f deployment.yaml --cluster cluster.yaml | kubectl apply -f -")
    inject.set_defaults(command=_print, objects=_inject)
    about = "YAML file with Deployments or similar objects; - for standard input"
    inject.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)
    about = "YAML file with LMCacheClusters (default: those in FILE)"
    inject.add_argument("--cluster", type=Path, metavar="FILE", help=about)
    about = f"LMCacheCluster for pods that have no label and certainly run {ANY_ENGINE} (default: none)"
    inject.add_argument("--name", metavar="NAME", help=about)


def context(arguments: argparse.Namespace) -> Context:
    """Return the settings of ``rendering_options`` as components need them."""
    images = {ENGINE: arguments.engine_image, SIDECAR: arguments.sidecar_image}
    flags = arguments.operator_namespace, arguments.allow_all_gpus_sidecar, arguments.shard_image
    flag_of = {kind.name: f"{kind.image_flag}_image" for kind in ENGINE_KINDS.values()}
    engines = {name: getattr(arguments, flag_of[name]) for name in OTHER_ENGINES}
    listed: str = arguments.pod_ips
    hosts = ("::" if ":" in ips else "0.0.0.0" for ips in (listed, listed.partition(",")[0]))
    platform = Platform(arguments.assigned_ids, *hosts)
    return Context(images, *flags, engines, arguments.router_image, platform)


def _print(arguments: argparse.Namespace) -> int:
    """Print the objects that a command derives from a file."""
    try:
        with file_errors(arguments.filename):
            text = dump(arguments.objects(arguments))
    except FileError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    print(text, end="")
    return 0


def _render(arguments: argparse.Namespace) -> list[Object]:
    objects = read_objects(arguments.filename)
    resources = [each for each in objects if isinstance(each, dict) and each.get("kind") == KIND]
    rendered = [_rendered(each, resources, context(arguments)) for each in resources]
    if not rendered:
        raise ValueError(f"contains no {KIND}")
    return [*chain.from_iterable(rendered)]


def _rendered(resource: Object, resources: list[Object], context: Context) -> list[Object]:
    """The objects of a cluster, and those of the cluster of its prefill pods, which refers to it."""
    cluster = replace(with_lenders(resource, resources), platform=context.platform)
    children = [child for component in COMPONENTS for child in component.render(cluster, context)]
    inner = [_rendered(child, resources, context) for child in children if child["kind"] == KIND]
    return [*children, *chain.from_iterable(inner)]


def _inject(arguments: argparse.Namespace) -> list[Object]:
    resources: list[Any] = []
    if arguments.cluster:
        with file_errors(arguments.cluster):
            resources = read_objects(arguments.cluster)
            clusters_in(resources)  # mistakes name this file
    objects = read_objects(arguments.filename)
    injected = inject_objects(objects, resources, arguments.name, context(arguments))
    print(*injected.remarks, sep="\n", file=sys.stderr)
    return injected.objects
