"""Command line: `lmcache-operator run | render | crd`."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from . import __version__
from .api.crd import render as render_crd
from .api.parse import InvalidSpec, parse
from .api.plain_yaml import dump
from .settings import RenderSettings, Settings
from .specs.children import children
from .specs.names import ENGINE, SIDECAR

_DEFAULTS = Settings()
_EXIT_USAGE = 2


class _JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    result: int = arguments.command(arguments)
    return result


def _parser() -> argparse.ArgumentParser:
    about = "Turns LMCacheCluster objects into running engine pods with a KV cache."
    parser = argparse.ArgumentParser(prog="lmcache-operator", description=about)
    parser.add_argument("--version", action="version", version=f"lmcache-operator {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="watch a Kubernetes cluster and look after its LMCacheClusters")
    run.set_defaults(command=_run)
    scope = run.add_mutually_exclusive_group()
    namespace_help = "watch this namespace only; may be repeated"
    scope.add_argument("--namespace", action="append", metavar="NAME", help=namespace_help)
    scope.add_argument("--all-namespaces", action="store_true", help="watch all namespaces (the default)")
    add = partial(_add_option, run)
    add("--kubeconfig", "FILE", None, "default: $KUBECONFIG, else the pod's own ServiceAccount")
    add("--health-port", "PORT", _DEFAULTS.health_port, "port of /healthz")
    add("--metrics-port", "PORT", _DEFAULTS.metrics_port, "port of /metrics")
    add("--log-format", None, "text", "how to write log lines", choices=("text", "json"))
    add("--log-level", None, "info", "what to log", choices=("debug", "info", "warning", "error"))

    render = commands.add_parser("render", help="print what `run` would apply; needs no Kubernetes cluster")
    render.set_defaults(command=_render)
    file_help = "YAML file with LMCacheClusters; - for standard input"
    render.add_argument("-f", "--filename", type=Path, required=True, metavar="FILE", help=file_help)
    for command in (run, render):
        group = command.add_argument_group("rendering")
        add = partial(_add_option, group)
        add("--engine-image", "IMAGE", _DEFAULTS.render.engine_image, "for clusters that name none")
        add("--sidecar-image", "IMAGE", _DEFAULTS.render.sidecar_image, "for clusters that name none")
        sight_help = "let sidecars that can't share a claim see all GPUs of their node, also other tenants'"
        group.add_argument("--allow-all-gpus-sidecar", action="store_true", help=sight_help)

    crd = commands.add_parser("crd", help="print the CustomResourceDefinition")
    crd.set_defaults(command=_crd)
    add = partial(_add_option, crd)
    add("--check", "FILE", None, "print nothing; exit 1 if FILE is not up to date", type=Path)
    return parser


def _add_option(
    group: argparse._ActionsContainer, flag: str, metavar: str | None, default: Any, about: str, **more: Any
) -> None:
    """An option of the default's type; its help names the default."""
    text = about if default is None else f"{about} (default: {default})"
    kind = {"type": type(default)} if default is not None else {}
    group.add_argument(flag, metavar=metavar, default=default, help=text, **kind | more)


def _render_settings(arguments: argparse.Namespace) -> RenderSettings:
    return RenderSettings(
        engine_image=arguments.engine_image,
        sidecar_image=arguments.sidecar_image,
        allow_all_gpus_sidecar=arguments.allow_all_gpus_sidecar,
    )


def _run(arguments: argparse.Namespace) -> int:
    from .app import main as run_app  # kopf and the client take half a second to import

    handler = logging.StreamHandler()
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_JsonFormatter() if arguments.log_format == "json" else text)
    logging.basicConfig(level=arguments.log_level.upper(), handlers=[handler])
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # else one line for every event
    run_app(
        Settings(
            namespaces=tuple(arguments.namespace or ()),
            kubeconfig=arguments.kubeconfig,
            health_port=arguments.health_port,
            metrics_port=arguments.metrics_port,
            render=_render_settings(arguments),
        )
    )
    return 0


def _render(arguments: argparse.Namespace) -> int:
    settings = _render_settings(arguments)
    images = {ENGINE: settings.engine_image, SIDECAR: settings.sidecar_image}
    rendered = []
    try:
        text = sys.stdin.read() if str(arguments.filename) == "-" else arguments.filename.read_text()
        for resource in yaml.safe_load_all(text):
            if isinstance(resource, dict) and resource.get("kind") == "LMCacheCluster":
                rendered += children(parse(resource), images, settings)
    except (OSError, yaml.YAMLError, InvalidSpec) as error:
        print(f"{arguments.filename}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    if not rendered:
        print(f"{arguments.filename}: holds no LMCacheCluster", file=sys.stderr)
        return _EXIT_USAGE
    print(dump(rendered), end="")
    return 0


def _crd(arguments: argparse.Namespace) -> int:
    if arguments.check is None:
        print(render_crd(), end="")
        return 0
    if arguments.check.exists() and arguments.check.read_text() == render_crd():
        return 0
    print(f"{arguments.check} is out of date: lmcache-operator crd > {arguments.check}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
