"""``kubectl lmcache report``: a zip file with everything that helps others to find a problem of a cluster."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from zipfile import ZIP_DEFLATED, ZipFile

from lmcache_cli.commands import connection, printing
from lmcache_cli.commands.gather import POD_SECONDS, Gathered, read_stats, sidecar_port
from lmcache_cli.commands.status import status_of
from lmcache_cli.commands.status_screen import screen
from lmcache_operator import __version__
from lmcache_operator.kube.pod_http import PodHttp
from lmcache_operator.kube.refusals import error_of
from lmcache_operator.manifests import file_errors
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import CHILDREN, CLUSTER, EVENT, POD, Kind
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.redaction import Redactor
from lmcache_store.common.text import plain
from lmcache_store.common.units import parse_seconds

_CLAIM = Kind("", "v1", "PersistentVolumeClaim", "persistentvolumeclaims")
_ALL_STATS_SECONDS, _LOG_SECONDS = 30.0, 20.0
"""Time for all sidecars, and for one log."""
_MAX_LOG_BYTES = 16 << 20
_ABOUT = """\
Write a zip file for a bug report: objects, status, Events, figures, logs and versions of a cluster.

It has no Secrets, and values that look secret are removed. errors.txt lists the parts that cannot be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    status = "exit status: 0, also if parts are missing; 2 if the cluster cannot be read, or no file written"
    printing.describe(parser, _ABOUT, status, "-n team qwen3-8b --since 2h")
    connection.add_connection(parser)
    about = "file to write (default: lmcache-report-NAMESPACE-NAME-TIME.zip)"
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help=about)
    about = "only log lines newer than this, such as 30m, 2h or 7d (default: all)"
    parser.add_argument("--since", type=_duration, metavar="TIME", help=about)
    about = "only the last N lines of each log (default: %(default)s)"
    parser.add_argument("--tail", type=int, default=10_000, metavar="N", help=about)
    parser.set_defaults(command=_run)


def _duration(text: str) -> int:
    if not (seconds := parse_seconds(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 30m, 2h or 7d")
    return seconds


def _run(arguments: argparse.Namespace) -> int:
    async def write(connected: connection.ApiConnection) -> int:
        cluster = await connected.cluster(arguments.name)
        name, time = cluster["metadata"]["name"], datetime.now(UTC)
        file = f"lmcache-report-{connected.namespace}-{name}-{time:%Y%m%dT%H%M%SZ}.zip"
        path = arguments.output or Path(file)
        with file_errors(path), ZipFile(path, "w", ZIP_DEFLATED) as archive:
            bundle = _Bundle(connected, cluster, archive, arguments)
            await bundle.write()
        printing.print_problems(bundle.problems)
        print(f"Wrote {path} ({path.stat().st_size / 1e3:,.0f} kB). Look through it before you send it.")
        return 0

    return connection.run(arguments, write)


@dataclass
class _Bundle:
    """The zip file of one cluster while it is written. Parts that cannot be read become problems."""

    connected: connection.ApiConnection
    cluster: Object
    archive: ZipFile
    arguments: argparse.Namespace
    problems: list[str] = field(default_factory=list)
    """Names of parts that cannot be read, each with the reason."""
    redactor: Redactor = field(default_factory=Redactor)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(8))
    """Logs in memory at the same time."""

    async def write(self) -> None:
        """Read all parts, and write them."""
        objects, events = await self._objects()
        for each in objects:
            place = f"{each['metadata']['namespace']}/{each['kind']}/{each['metadata']['name']}"
            await self._add(f"objects/{place}.yaml", each)
        await self._add("events.yaml", events)
        pods = [each for each in objects if each["kind"] == POD.kind]
        await self._add_figures(pods)
        await asyncio.gather(*(self._add_log(*log) for pod in pods for log in _logs_of(pod)))
        await self._add("errors.txt", "\n".join(self.problems or ["Nothing is missing."]))

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Convert an error in the context to a problem. An error of the zip file itself passes."""
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # an object of an unusual form must not cost the other parts
            self.problems.append(f"{name}: {plain(getattr(error, 'message', repr(error)))}")

    async def _add(self, name: str, content: Any) -> None:
        """Write a file: a text, or plain data as YAML."""
        with self._part(name):
            redacted = await asyncio.to_thread(self.redactor.value, content)  # a log can take seconds
            text = redacted if isinstance(redacted, str) else printing.document(redacted, "yaml")
            self.archive.writestr(name, text)

    async def _find(self, kind: Kind, namespace: str, **selectors: str) -> list[Object]:
        """List objects with their kind, which lists of the API server leave out. They still have secrets."""
        with self._part(f"{kind.plural} in {namespace or 'all namespaces'}"):
            if kind not in CHILDREN or await self.connected.api.serves(kind):  # cert-manager may be missing
                objects = await self.connected.api.find(kind, namespace, **selectors)
                header = {"apiVersion": kind.api_version, "kind": kind.kind}
                self.redactor.value(objects)  # learns the secrets before any file is written
                return [header | each for each in objects]
        return []

    async def _objects(self) -> tuple[list[Object], list[Object]]:
        """Return the objects of the cluster with the operator's pods, and Events about them."""
        name, within = self.cluster["metadata"]["name"], self.connected.namespace
        selector, injected = f"{names.CLUSTER_LABEL}={name}", f"{names.INJECT_LABEL}={name}"
        operator = ",".join(f"{key}={value}" for key, value in names.OPERATOR_LABELS.items())
        events, claims, *lists = await asyncio.gather(
            self._find(EVENT, within),
            self._find(_CLAIM, within),
            self._find(POD, "", labelSelector=operator),
            self._find(POD, within, labelSelector=injected),
            self._find(CLUSTER, within, fieldSelector=f"metadata.name={name}"),
            *(self._find(kind, within, labelSelector=selector) for kind in (POD, CLUSTER, *CHILDREN)),
        )
        objects = {each["metadata"]["uid"]: each for each in chain.from_iterable(lists)}
        # Volume claims, and deleted objects of which Events remain, have names that begin like their owner's.
        begins = (f"{name}-", *(f"{each['metadata']['name']}-" for each in objects.values()))
        of_pods = [each for each in claims if each["metadata"]["name"].startswith(begins)]
        about = [each for each in events if f"{dig(each, 'involvedObject', 'name')}-".startswith(begins)]
        return [*objects.values(), *of_pods], about

    async def _add_figures(self, pods: Sequence[Object]) -> None:
        """Write /stats of all sidecars, the screen of ``status``, and all versions."""
        get, having = PodHttp(self.connected.api, seconds=POD_SECONDS).get, list(filter(sidecar_port, pods))
        figures = await read_stats(get, having, seconds=_ALL_STATS_SECONDS)
        self.problems += [f"stats/{each.name}.yaml: {each.problem}" for each in figures if each.problem]
        for each in figures:
            await self._add(f"stats/{each.name}.yaml", each.stats or each.problem)
        with self._part("status.txt"):
            status = status_of(Gathered(self.cluster, tuple(figures), ()))
            lines = screen(status, printing.Style(False), printing.terminal_width(), all_pods=True)
            await self._add("status.txt", "\n".join(lines))
        with self._part("versions/kubernetes.json"):
            await self._add("versions/kubernetes.json", (await self._read("/version", POD_SECONDS)).decode())
        statuses = [each for pod in pods for each in _listed(pod.get("status"), "containerstatuses")]
        images = sorted({f"{each.get('image')} {each.get('imageID')}" for each in statuses})
        await self._add("versions/command.yaml", {"command": __version__, "images": images})

    async def _add_log(self, name: str, path: str) -> None:
        options = {"timestamps": "true", "limitBytes": _MAX_LOG_BYTES, "tailLines": self.arguments.tail}
        options |= {"sinceSeconds": self.arguments.since} if self.arguments.since else {}
        with self._part(name):
            async with self.slots:
                body = await self._read(f"{path}&{urlencode(options)}", _LOG_SECONDS)
                await self._add(name, body.decode(errors="replace"))
            if len(body) >= _MAX_LOG_BYTES:
                self.problems.append(f"{name}: cut after {_MAX_LOG_BYTES >> 20} MiB: use --since or --tail")

    async def _read(self, path: str, seconds: float) -> bytes:
        """Read any path of the API server. Raises ApiError."""
        status, body = await self.connected.api.read(path, seconds=seconds, max_bytes=2 * _MAX_LOG_BYTES)
        if status != HTTPStatus.OK:
            raise error_of(path, status, body)
        return body


def _listed(part: Any, kind: str) -> list[Object]:
    """Return the items of all lists of a pod's spec or status whose names end like this."""
    fields = (part or {}).items()
    return [each for name, listed in fields if name.lower().endswith(kind) for each in listed or ()]


def _logs_of(pod: Object) -> Iterator[tuple[str, str]]:
    """Yield a file name and a path of the API for the log of each container, also before a restart."""
    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    statuses = {each["name"]: each for each in _listed(pod.get("status"), "containerstatuses")}
    for container in (each["name"] for each in _listed(pod.get("spec"), "containers")):
        path = f"/api/v1/namespaces/{namespace}/pods/{name}/log?container={container}"
        yield f"logs/{namespace}/{name}/{container}.log", path
        if dig(statuses, container, "restartCount"):
            yield f"logs/{namespace}/{name}/{container}.previous.log", f"{path}&previous=true"
