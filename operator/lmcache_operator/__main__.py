"""The command line ``lmcache-operator``."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from lmcache_operator import __version__, manifests
from lmcache_operator.errors import LeaseLostError
from lmcache_store.common.logs import set_up
from lmcache_store.common.options import Parser, describe

_EXIT_USAGE, _EXIT_LEASE_LOST = 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status."""
    # The Kubernetes client reads these variables at import. A pod's user may have no home.
    os.environ.setdefault("HOME", "/")
    if not os.environ.get("KUBECONFIG"):
        os.environ.pop("KUBECONFIG", None)  # as for kubectl, an empty variable is not set
    arguments = _parser().parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    about = "Runs the engine pods and KV caches that LMCacheCluster objects declare."
    parser = Parser(prog="lmcache-operator")
    describe(parser, about, "", "run --namespace team", "render -f cluster.yaml")
    parser.add_argument("--version", action="version", version=f"lmcache-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    rendering = manifests.rendering_options()
    about = "watch a Kubernetes cluster and reconcile its LMCacheClusters"
    run = commands.add_parser("run", parents=[rendering], help=about)
    describe(run, about, "", "--namespace team --kubeconfig ~/.kube/config")
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
    manifests.add_commands(commands, rendering)
    return parser


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
        manifests.context(arguments),
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


if __name__ == "__main__":
    sys.exit(main())
