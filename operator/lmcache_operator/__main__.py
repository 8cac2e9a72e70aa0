"""The command line: ``lmcache-operator run | render | inject | curve``, also as ``kubectl lmcache``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from lmcache.logging import set_up
from lmcache_operator import __version__
from lmcache_operator.api import KIND
from lmcache_operator.api.documents import dump, load
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.autoscaling.show.curve import TIERS, Curve
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.errors import FileError, InvalidSpecError, LeaseLostError, NoCurveError, OperatorError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER
from lmcache_operator.specs.names import ENGINE, SHARD_IMAGE, SIDECAR, STOCK_IMAGES

_EXIT_USAGE, _EXIT_LEASE_LOST = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    about = "Runs the engine pods and KV caches that LMCacheCluster objects declare."
    parser = argparse.ArgumentParser(prog="lmcache-operator", description=about)
    parser.add_argument("--version", action="version", version=f"lmcache-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    rendering = argparse.ArgumentParser(add_help=False)
    for name, image in STOCK_IMAGES.items():
        about = f"default image of the {name} container (default: %(default)s)"
        rendering.add_argument(f"--{name}-image", metavar="IMAGE", default=image, help=about)
    about = "default Valkey or Redis image of managed remote tiers (default: %(default)s)"
    rendering.add_argument("--shard-image", metavar="IMAGE", default=SHARD_IMAGE, help=about)
    about = "namespace of the operator's pod; the operator may then reach sidecars' metrics (default: none)"
    rendering.add_argument("--operator-namespace", metavar="NAME", default="", help=about)
    about = "without a shared claim, let sidecars see all GPUs of their nodes (default: no GPUs)"
    rendering.add_argument("--allow-all-gpus-sidecar", action="store_true", help=about)

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
    about = "LMCacheCluster for pods that have no label and certainly run vLLM (default: none)"
    inject.add_argument("--name", metavar="NAME", help=about)

    _add_curve(commands)
    return parser


def _add_curve(commands: Any) -> None:
    about = "show the hit ratio and value of each size of a cluster's cache tier"
    curve = commands.add_parser("curve", help=about)
    curve.set_defaults(command=_curve)
    about = "name of the LMCacheCluster (default: the first one in FILE)"
    curve.add_argument("name", nargs="?", metavar="NAME", help=about)
    about = "namespace (default: that of the kubeconfig's present context)"
    curve.add_argument("-n", "--namespace", metavar="NAME", help=about)
    curve.add_argument("--kubeconfig", metavar="FILE", help="default: the same file as kubectl")
    about = "read the LMCacheCluster from a YAML or JSON file instead of the API server; - for standard input"
    curve.add_argument("-f", "--filename", type=Path, metavar="FILE", help=about)
    curve.add_argument("--tier", choices=TIERS, default=TIERS[0], help="default: %(default)s")
    about = "also write the curve to this file, as a picture"
    curve.add_argument("-o", "--output", type=Path, metavar="FILE.svg", help=about)


def _context(arguments: argparse.Namespace) -> Context:
    images = {ENGINE: arguments.engine_image, SIDECAR: arguments.sidecar_image}
    flags = arguments.operator_namespace, arguments.allow_all_gpus_sidecar, arguments.shard_image
    return Context(images, *flags)


def _run(arguments: argparse.Namespace) -> int:
    # The Kubernetes client reads HOME at import, and a pod's user may have no home.
    os.environ.setdefault("HOME", "/")
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
        with _file_errors(arguments.filename):
            text = dump(arguments.objects(arguments))
    except FileError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    print(text, end="")
    return 0


def _curve(arguments: argparse.Namespace) -> int:
    picture: Path | None = arguments.output
    try:
        if picture and picture.suffix != ".svg":
            raise FileError(f"{picture}: pictures are SVG: name a file that ends in .svg")
        if arguments.filename:
            with _file_errors(arguments.filename):
                resource = _named(_read(arguments.filename), arguments.name)
        elif arguments.name:
            resource = asyncio.run(_fetched(arguments))
        else:
            raise FileError("name an LMCacheCluster, or a file that contains one: -f FILE")
        curve = Curve.of(resource, arguments.tier)
        print(curve.text(shutil.get_terminal_size().columns), end="")
        if picture:
            with _file_errors(picture):
                picture.write_text(curve.picture(), encoding="utf-8")
    except OperatorError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    return 0


def _named(objects: list[Any], name: str | None) -> Object:
    """The first LMCacheCluster, or the first of this name, also in a List of ``kubectl get -o yaml``."""
    documents = [document for document in objects if isinstance(document, dict)]
    for item in chain.from_iterable((each, *(each.get("items") or ())) for each in documents):
        if item.get("kind") == KIND and name in (None, item["metadata"]["name"]):
            return dict(item)
    raise ValueError(f"contains no {KIND}{f' {name}' if name else ''}")


async def _fetched(arguments: argparse.Namespace) -> Object:
    # Imported here for the same reason as in _run.
    from kubernetes.aio.config import ConfigException

    from lmcache_operator.kube.client import connect
    from lmcache_operator.kube.watch import default_namespace

    if arguments.kubeconfig:
        os.environ["KUBECONFIG"] = arguments.kubeconfig
    async with AsyncExitStack() as stack:
        try:
            namespace = arguments.namespace or default_namespace()
            api = await stack.enter_async_context(connect())
        except (ConfigException, OSError, TypeError, yaml.YAMLError) as error:
            raise FileError(f"{os.environ.get('KUBECONFIG', '~/.kube/config')}: {error}") from error
        resource = await api.get(CLUSTER, namespace, arguments.name)
    if resource is None:
        raise NoCurveError(
            f"there is no LMCacheCluster {arguments.name} in namespace {namespace}: "
            "`kubectl get lmcacheclusters -A` lists all"
        )
    return resource


@contextmanager
def _file_errors(path: Path) -> Iterator[None]:
    """Convert errors in the context to `FileError` with the file's name. A FileError passes unchanged."""
    try:
        yield
    except RecursionError as error:
        raise FileError(f"{path}: is nested too deeply") from error
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, InvalidSpecError) as error:
        raise FileError(f"{path}: {error}") from error


def _render(arguments: argparse.Namespace) -> list[Object]:
    rendered = []
    for resource in _read(arguments.filename):
        if isinstance(resource, dict) and resource.get("kind") == KIND:
            cluster = parse(resource)
            for component in COMPONENTS:
                rendered += component.render(cluster, _context(arguments))
    if not rendered:
        raise ValueError(f"contains no {KIND}")
    return rendered


def _inject(arguments: argparse.Namespace) -> list[Object]:
    clusters: list[Cluster] = []
    if arguments.cluster:
        with _file_errors(arguments.cluster):
            clusters = clusters_in(_read(arguments.cluster))
    objects = _read(arguments.filename)
    injected = inject_objects(objects, clusters, arguments.name, _context(arguments))
    print(*injected.remarks, sep="\n", file=sys.stderr)
    return injected.objects


def _read(path: Path) -> list[Any]:
    return load(sys.stdin.read() if str(path) == "-" else path.read_text())


if __name__ == "__main__":
    sys.exit(main())
