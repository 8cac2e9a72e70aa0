"""The command line, ``lmcache-operator`` or ``kubectl lmcache``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import chain
from pathlib import Path

from lmcache_operator import __version__
from lmcache_operator.api import KIND
from lmcache_operator.api.documents import dump
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.commands import COMMANDS
from lmcache_operator.commands.files import file_errors, read_objects
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import FileError, LeaseLostError
from lmcache_operator.specs import Object
from lmcache_operator.specs.names import (
    ENGINE,
    ROUTER_IMAGE,
    SGLANG_IMAGE,
    SHARD_IMAGE,
    SIDECAR,
    STOCK_IMAGES,
)
from lmcache_store.common.logs import set_up

_EXIT_USAGE, _EXIT_LEASE_LOST = 2, 3

_OTHER_IMAGES = (
    ("sglang", SGLANG_IMAGE, "image of the engine container if spec.engine.kind is SGLang"),
    ("shard", SHARD_IMAGE, "Valkey or Redis image of managed remote tiers"),
    ("router", ROUTER_IMAGE, "image of routers"),
)
"""Default images with flags, besides those of an engine pod: the flag's name, the image, and its use."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    # The Kubernetes client reads these variables at import. A pod's user may have no home.
    os.environ.setdefault("HOME", "/")
    if not os.environ.get("KUBECONFIG"):
        os.environ.pop("KUBECONFIG", None)  # as for kubectl, an empty variable is not set
    arguments = _parser(words).parse_args(words)
    return int(arguments.command(arguments))


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    about = "Runs the engine pods and KV caches that LMCacheCluster objects declare."
    is_plugin = Path(sys.argv[0]).name == "kubectl-lmcache"
    program = "kubectl lmcache" if is_plugin else "lmcache-operator"
    parser = argparse.ArgumentParser(prog=program, description=about)
    parser.add_argument("--version", action="version", version=f"lmcache-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    rendering = argparse.ArgumentParser(add_help=False)
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
    for name, about in COMMANDS.items():
        command = commands.add_parser(name, help=about)
        if name in argv:  # importing the client takes half a second, which other commands need not spend
            import_module(f"lmcache_operator.commands.{name}").add_arguments(command)

    about = "watch a Kubernetes cluster and reconcile its LMCacheClusters"
    run = commands.add_parser("run", parents=[rendering], help=about)
    run.set_defaults(command=_run)
    about = "watch only this namespace; may be repeated (default: all namespaces)"
    run.add_argument("--namespace", action="append", default=[], metavar="NAME", help=about)
    about = "default: $KUBECONFIG, else the pod's own ServiceAccount"
    run.add_argument("--kubeconfig", metavar="FILE", help=about)
    about = (
        "name of a Lease in --operator-namespace: only the operator that holds it works, others stand by "
        "(default: no election; this operator always works)"
    )
    run.add_argument("--leader-elect", metavar="LEASE", help=about)
    about = "default: %(default)s"
    run.add_argument("--health-port", type=int, metavar="PORT", default=8080, help=about)
    run.add_argument("--metrics-port", type=int, metavar="PORT", default=9465, help=about)
    run.add_argument("--log-format", choices=("text", "json"), default="text", help=about)
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=about)

    about = "print the objects that `run` would apply; needs no Kubernetes cluster"
    render = commands.add_parser("render", parents=[rendering], help=about)
    render.set_defaults(command=_print, objects=_render)
    about = "YAML file with LMCacheClusters; - for standard input"
    render.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)

    about = "inject the cache into Deployments and similar objects; needs no Kubernetes cluster"
    inject = commands.add_parser("inject", parents=[rendering], help=about)
    inject.set_defaults(command=_print, objects=_inject)
    about = "YAML file with Deployments or similar objects; - for standard input"
    inject.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)
    about = "YAML file with LMCacheClusters (default: those in FILE)"
    inject.add_argument("--cluster", type=Path, metavar="FILE", help=about)
    about = "LMCacheCluster for pods that have no label and certainly run vLLM or SGLang (default: none)"
    inject.add_argument("--name", metavar="NAME", help=about)

    return parser


def _context(arguments: argparse.Namespace) -> Context:
    images = {ENGINE: arguments.engine_image, SIDECAR: arguments.sidecar_image}
    flags = arguments.operator_namespace, arguments.allow_all_gpus_sidecar, arguments.shard_image
    return Context(images, *flags, arguments.sglang_image, arguments.router_image)


def _run(arguments: argparse.Namespace) -> int:
    # Importing kopf and the client takes half a second, which other commands need not spend.
    from lmcache_operator.app import run
    from lmcache_operator.election import LeaseName

    set_up(arguments.log_format, arguments.log_level)
    # These loggers write a line for every event and every probe.
    for name in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lease = None
    if arguments.leader_elect:
        if not arguments.operator_namespace:
            print("--leader-elect needs --operator-namespace, the namespace of the Lease", file=sys.stderr)
            return _EXIT_USAGE
        lease = LeaseName(arguments.operator_namespace, arguments.leader_elect)
    running = run(
        _context(arguments),
        kubeconfig=arguments.kubeconfig,
        namespaces=arguments.namespace,
        health_port=arguments.health_port,
        metrics_port=arguments.metrics_port,
        lease=lease,
    )
    try:
        asyncio.run(running)
    except LeaseLostError as error:
        logging.getLogger(__name__).error("%s; exiting, the restarted process will stand by", error)
        return _EXIT_LEASE_LOST
    except asyncio.CancelledError:
        pass  # SIGTERM arrived before kopf ran
    return 0


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
    rendered = []
    for resource in read_objects(arguments.filename):
        if isinstance(resource, dict) and resource.get("kind") == KIND:
            rendered += _rendered(resource, _context(arguments))
    if not rendered:
        raise ValueError(f"contains no {KIND}")
    return rendered


def _rendered(resource: Object, context: Context) -> list[Object]:
    """The objects of a cluster, and those of the cluster of its prefill pods."""
    cluster = parse(resource)
    children = [child for component in COMPONENTS for child in component.render(cluster, context)]
    inner = [_rendered(child, context) for child in children if child["kind"] == KIND]
    return [*children, *chain.from_iterable(inner)]


def _inject(arguments: argparse.Namespace) -> list[Object]:
    clusters: list[Cluster] = []
    if arguments.cluster:
        with file_errors(arguments.cluster):
            clusters = clusters_in(read_objects(arguments.cluster))
    objects = read_objects(arguments.filename)
    injected = inject_objects(objects, clusters, arguments.name, _context(arguments))
    print(*injected.remarks, sep="\n", file=sys.stderr)
    return injected.objects


if __name__ == "__main__":
    sys.exit(main())
