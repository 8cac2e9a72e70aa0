"""Command line: ``lmcache-operator run | render | inject | curve``; so is ``kubectl lmcache``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from lmcache.logging import set_up
from lmcache_operator import __version__
from lmcache_operator.api import KIND
from lmcache_operator.api.documents import dump, load
from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.components import COMPONENTS
from lmcache_operator.components.base import Context
from lmcache_operator.components.injection.workloads import clusters_in, inject_objects
from lmcache_operator.curve import TIERS, Curve
from lmcache_operator.errors import FileError, InvalidSpecError, LeaseLostError, NoCurveError, OperatorError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER
from lmcache_operator.specs.names import ENGINE, SHARD_IMAGE, SIDECAR, STOCK_IMAGES

_EXIT_USAGE, _EXIT_LEASE_LOST = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    about = "Turns LMCacheCluster objects into running engine pods with a KV cache."
    parser = argparse.ArgumentParser(prog="lmcache-operator", description=about)
    parser.add_argument("--version", action="version", version=f"lmcache-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    rendering = argparse.ArgumentParser(add_help=False)
    for name, image in STOCK_IMAGES.items():
        about = "for clusters that name none (default: %(default)s)"
        rendering.add_argument(f"--{name}-image", metavar="IMAGE", default=image, help=about)
    about = "Valkey or Redis, for managed remote tiers that name none (default: %(default)s)"
    rendering.add_argument("--shard-image", metavar="IMAGE", default=SHARD_IMAGE, help=about)
    about = "namespace of the operator's pod, which may reach the sidecars' metrics port (default: none)"
    rendering.add_argument("--operator-namespace", metavar="NAME", default="", help=about)
    about = "where no claim shares the engine's GPUs, let sidecars see all of their nodes (default: none)"
    rendering.add_argument("--allow-all-gpus-sidecar", action="store_true", help=about)

    about = "watch a Kubernetes cluster and reconcile its LMCacheClusters"
    run = commands.add_parser("run", parents=[rendering], help=about)
    run.set_defaults(command=_run)
    about = "watch this namespace only; may be repeated (default: all namespaces)"
    run.add_argument("--namespace", action="append", default=[], metavar="NAME", help=about)
    about = "default: $KUBECONFIG, else the pod's own ServiceAccount"
    run.add_argument("--kubeconfig", metavar="FILE", help=about)
    about = (
        "of all operators that name this Lease in --operator-namespace, one works and the others stand by "
        "(default: this one works, whoever else does)"
    )
    run.add_argument("--leader-elect", metavar="LEASE", help=about)
    about = "default: %(default)s"
    run.add_argument("--health-port", type=int, metavar="PORT", default=8080, help=about)
    run.add_argument("--metrics-port", type=int, metavar="PORT", default=9465, help=about)
    run.add_argument("--log-format", choices=("text", "json"), default="text", help=about)
    run.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info", help=about)

    about = "print what `run` would apply; needs no Kubernetes cluster"
    render = commands.add_parser("render", parents=[rendering], help=about)
    render.set_defaults(command=_print, objects=_render)
    about = "YAML file with LMCacheClusters; - for standard input"
    render.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)

    about = "print Deployments and the like with the cache in their pods; needs no Kubernetes cluster"
    inject = commands.add_parser("inject", parents=[rendering], help=about)
    inject.set_defaults(command=_print, objects=_inject)
    about = "YAML file with objects that make pods; - for standard input"
    inject.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=about)
    about = "YAML file with LMCacheClusters (default: those in FILE)"
    inject.add_argument("--cluster", type=Path, metavar="FILE", help=about)
    about = "LMCacheCluster of pods without the label that are vLLM's for certain (default: none)"
    inject.add_argument("--name", metavar="NAME", help=about)

    _add_curve(commands)
    return parser


def _add_curve(commands: Any) -> None:
    about = "show what sizes of a cluster's cache tier would hit and be worth"
    curve = commands.add_parser("curve", help=about)
    curve.set_defaults(command=_curve)
    about = "an LMCacheCluster (default: the first in FILE)"
    curve.add_argument("name", nargs="?", metavar="NAME", help=about)
    about = "default: that of the kubeconfig's context"
    curve.add_argument("-n", "--namespace", metavar="NAME", help=about)
    curve.add_argument("--kubeconfig", metavar="FILE", help="default: as kubectl's")
    about = "read it from this YAML or JSON file, and from no API server; - for standard input"
    curve.add_argument("-f", "--filename", type=Path, metavar="FILE", help=about)
    curve.add_argument("--tier", choices=TIERS, default=TIERS[0], help="default: %(default)s")
    about = "write it there as a picture"
    curve.add_argument("-o", "--output", type=Path, metavar="FILE.svg", help=about)


def _context(arguments: argparse.Namespace) -> Context:
    images = {ENGINE: arguments.engine_image, SIDECAR: arguments.sidecar_image}
    flags = arguments.operator_namespace, arguments.allow_all_gpus_sidecar, arguments.shard_image
    return Context(images, *flags)


def _run(arguments: argparse.Namespace) -> int:
    # The client asks for a home at its import, and the user of a pod need not have one.
    os.environ.setdefault("HOME", "/")
    # kopf and the client take half a second to import
    from lmcache_operator.app import run
    from lmcache_operator.election import LeaseName

    set_up(arguments.log_format, arguments.log_level)
    # A line for every event, and for every probe.
    for name in ("kopf.objects", "kopf.activities.probe", "aiohttp.access"):
        logging.getLogger(name).setLevel(logging.WARNING)
    lease = None
    if arguments.leader_elect:
        if not arguments.operator_namespace:
            print("--leader-elect needs --operator-namespace, where the Lease is", file=sys.stderr)
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
        logging.getLogger(__name__).error("%s: ending, to stand by in a new life", error)
        return _EXIT_LEASE_LOST
    except asyncio.CancelledError:
        pass  # SIGTERM before kopf runs
    return 0


def _print(arguments: argparse.Namespace) -> int:
    """Print the objects that a command makes of a file."""
    try:
        with _blamed(arguments.filename):
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
            with _blamed(arguments.filename):
                resource = _named(_read(arguments.filename), arguments.name)
        elif arguments.name:
            resource = asyncio.run(_fetched(arguments))
        else:
            raise FileError("name an LMCacheCluster, or a file that holds one: -f FILE")
        curve = Curve.of(resource, arguments.tier)
        print(curve.text(shutil.get_terminal_size().columns), end="")
        if picture:
            with _blamed(picture):
                picture.write_text(curve.picture(), encoding="utf-8")
    except OperatorError as error:
        print(error, file=sys.stderr)
        return _EXIT_USAGE
    return 0


def _named(objects: list[Any], name: str | None) -> Object:
    """The first LMCacheCluster, or the first of this name; also from what ``kubectl get -o yaml`` prints."""
    flat = [
        one for found in objects if isinstance(found, dict) for one in (found, *(found.get("items") or ()))
    ]
    for found in flat:
        if found.get("kind") == KIND and name in (None, found["metadata"]["name"]):
            return dict(found)
    raise ValueError(f"holds no {KIND}{f' {name}' if name else ''}")


async def _fetched(arguments: argparse.Namespace) -> Object:
    # As in _run.
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
        found = await api.get(CLUSTER, namespace, arguments.name)
    if found is None:
        raise NoCurveError(
            f"there is no LMCacheCluster {arguments.name} in namespace {namespace}: "
            "`kubectl get lmcacheclusters -A` lists all"
        )
    return found


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """What goes wrong within is the file's fault, if no other's. Raises `FileError`."""
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
        raise ValueError(f"holds no {KIND}")
    return rendered


def _inject(arguments: argparse.Namespace) -> list[Object]:
    clusters: list[Cluster] = []
    if arguments.cluster:
        with _blamed(arguments.cluster):
            clusters = clusters_in(_read(arguments.cluster))
    objects = _read(arguments.filename)
    injected = inject_objects(objects, clusters, arguments.name, _context(arguments))
    print(*injected.remarks, sep="\n", file=sys.stderr)
    return injected.objects


def _read(path: Path) -> list[Any]:
    return load(sys.stdin.read() if str(path) == "-" else path.read_text())


if __name__ == "__main__":
    sys.exit(main())
