"""The operator process: kopf watches, the queue schedules, and the reconciler does the work.

Only ``on.event`` handlers are registered, because these write nothing to objects. kopf's change handlers,
timers and daemons would add annotations or finalizers. Without them, deletion works while the operator is
down, and a restart changes nothing.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import logging
import os
import platform
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from secrets import token_urlsafe
from typing import Any, cast

import kopf
from aiohttp import web
from prometheus_client import start_http_server

from lmcache_operator import metrics
from lmcache_operator.api import HEARTBEAT
from lmcache_operator.autoscaling.poller import Poller
from lmcache_operator.components.registry import COMPONENTS, kinds_of
from lmcache_operator.contract.base import Context
from lmcache_operator.election import Elector, LeaseName, new_identity
from lmcache_operator.errors import ApiError, RefusedError
from lmcache_operator.kube.client import KubeApi, connect
from lmcache_operator.kube.fence import WriteFence
from lmcache_operator.kube.watch import login
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.shared_leases import SharedLeases
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import CLUSTER, OPTIONAL, PROFILE, SECRET, ClusterKey, Kind, owner_key
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import FIELD_MANAGER, MANAGED_BY_LABEL
from lmcache_operator.stats import StatsClient

logger = logging.getLogger(__name__)

_NUM_WORKERS = 8
"""Number of clusters that are reconciled concurrently. More do not increase the throughput."""
_MAX_RUN_SECONDS = 300.0
"""Longest normal reconciliation. A longer one hangs, since each call times out after 30 s."""
_DEFINITION_SECONDS = 1.0
"""Time between checks for the custom resource definitions."""
_NUM_LOOKS_FOR_PROFILES = 10
"""Number of checks for the LMCacheProfile definition. Engines run without it; a condition reports it."""
_POLL_SECONDS = 5.0
"""Timeout of one request of the autoscaling poller."""
_IN_HEARTBEATS = {"managedFields", "resourceVersion", HEARTBEAT}
"""Fields of an LMCacheCluster's metadata and status that each heartbeat changes."""
_Queue = KeyedQueue[ClusterKey]


async def run(
    context: Context,
    *,
    kubeconfig: str | None,
    namespaces: Sequence[str],
    health_port: int,
    metrics_port: int,
    lease: LeaseName | None,
) -> None:
    """Run until SIGTERM or SIGINT. Without ``namespaces``, watch all of them.

    With ``lease``, stand by without watching anything until this operator holds the Lease.

    Raises:
        LeaseLostError: another operator holds the Lease.
    """
    if kubeconfig is not None:
        os.environ["KUBECONFIG"] = kubeconfig  # for this operator's client and for kopf's
    start_http_server(metrics_port, "::" if socket.has_dualstack_ipv6() else "0.0.0.0")
    health = Health()
    task = asyncio.current_task()
    assert task is not None
    # kopf replaces this handler when it starts.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with health.serve(health_port):
        if lease is None:
            metrics.LEADING.set(1)
            await _work(context, namespaces, health)
            return
        async with connect() as api:
            elector = Elector(api, lease, new_identity(os.environ.get("POD_NAME") or platform.node()))
            shared = SharedLeases(api, elector, namespaces)

            async def work() -> None:
                await _work(context, namespaces, health, shared, await token_key(api, lease))

            await shared.lead(work)


async def _work(
    context: Context,
    namespaces: Sequence[str],
    health: Health,
    shared: SharedLeases | None = None,
    key: bytes = b"",
) -> None:
    async with (
        connect(shared or WriteFence()) as api,
        StatsClient(key=key) as stats,
        StatsClient(seconds=_POLL_SECONDS, key=key) as patient,
    ):
        poller = Poller(patient, lambda key: queue.wake(key))
        reconciler = Reconciler(
            api, context, stats.read,
            token_of=stats.token, autoscaler=poller, wake=lambda key: queue.wake(key),
        )  # fmt: skip
        work = shared.guarded(reconciler.reconcile) if shared else reconciler.reconcile
        queue = KeyedQueue(work, num_workers=_NUM_WORKERS, rest=reconciler.rest)

        async def settle() -> None:
            await poller.close()
            await api.settle()

        metrics.CLUSTERS.set_function(lambda: len(queue))
        metrics.QUEUE_DEPTH.set_function(lambda: queue.num_waiting)
        health.longest_run_seconds = queue.longest_run_seconds
        try:
            await wait_for_definition(api)
            await kopf.operator(
                registry=build_registry(queue, settle),
                settings=_kopf_settings(namespaces),
                standalone=True,
                # kopf would derive an identity from the user's name, which a pod's user may not have.
                identity=cast(Any, FIELD_MANAGER),
                clusterwide=not namespaces,
                namespaces=namespaces,
            )
        finally:
            await settle()


async def token_key(api: KubeApi, lease: LeaseName) -> bytes:
    """Return the key of the operator's tokens for sidecars, from the Secret in its own namespace.

    The operator creates this Secret, which is the only one that it may read. Empty: the API server refuses.
    Sidecars that ask for a token then refuse the operator.
    """
    name = f"{lease.name}-pages-key"
    metadata = {"name": name, "namespace": lease.namespace, "labels": {MANAGED_BY_LABEL: FIELD_MANAGER}}
    secret: Object = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata}
    secret["stringData"] = {"key": token_urlsafe(32)}
    problem = ""
    while True:
        try:
            # The first read: quotas and webhooks refuse a create even if the object exists.
            stored = await api.get(SECRET, lease.namespace, name) or await api.create(SECRET, secret)
            if stored is not None:  # None: another operator has just created it
                return _key_in(stored)
        except RefusedError as error:
            logger.error(
                "no token opens pages of sidecars that ask for one, without Secret %s: %s", name, error
            )
            return b""
        except ApiError as error:
            if str(error) != problem:
                logger.warning("waiting for Secret %s, which has the key of tokens: %s", name, error)
            problem = str(error)
        await asyncio.sleep(_DEFINITION_SECONDS)


def _key_in(secret: Object) -> bytes:
    key = base64.b64decode(dig(secret, "data", "key") or "")
    if not key:
        name = secret["metadata"]["name"]
        logger.error("Secret %s has no key. Delete it, and restart the operator to create another", name)
    return key


class Health:
    """Answers the kubelet's probes: the process is healthy while no reconciliation hangs."""

    def __init__(self) -> None:
        self.longest_run_seconds: Callable[[], float] = lambda: 0.0

    @contextlib.asynccontextmanager
    async def serve(self, port: int) -> AsyncIterator[None]:
        """Serve /healthz on a port while the context is open."""
        application = web.Application()
        application.router.add_get("/healthz", self._answer)
        runner = web.AppRunner(application, access_log=None)  # probes would fill the log
        await runner.setup()
        await web.TCPSite(runner, port=port).start()
        try:
            yield
        finally:
            await runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        seconds = self.longest_run_seconds()
        if seconds > _MAX_RUN_SECONDS:
            return web.Response(status=500, text=f"a reconciliation has been running for {seconds:.0f} s\n")
        return web.Response(text="ok\n")


async def wait_for_definition(api: KubeApi) -> None:
    """Wait until the API server serves the custom kinds, because kopf looks for them only at its start."""
    for kind, num_looks in ((CLUSTER, None), (PROFILE, _NUM_LOOKS_FOR_PROFILES)):
        for look in itertools.count(1):
            with contextlib.suppress(ApiError):
                if await api.serves(kind):
                    break
            if look == 1:
                logger.warning("waiting for the CRD %s.%s in the API server", kind.plural, kind.group)
            if look == num_looks:
                break
            await asyncio.sleep(_DEFINITION_SECONDS)


def build_registry(queue: _Queue, settle: Callable[[], Awaitable[object]]) -> kopf.OperatorRegistry:
    """The event handlers of kopf, which wake clusters. At exit, ``settle`` waits for pending writes."""
    registry = kopf.OperatorRegistry()
    reports: dict[str, Object] = {}  # of clusters with an owner, by their uids

    # These are coroutines, because kopf runs plain functions in threads, and the queue is not thread-safe.
    async def cluster_changed(
        namespace: str | None, meta: Mapping[str, Any], type: str | None, status: Mapping[str, Any], **_: Any
    ) -> None:
        # A status write does not change the generation, and so wakes no cluster. Otherwise a status text that
        # differs each time would defeat all back-offs.
        version = None if type == "DELETED" else (meta.get("generation"), dict(meta.get("annotations") or {}))
        queue.wake(ClusterKey(namespace or "", meta["name"], meta["uid"]), version)
        # The status of prefill pods is part of their owner's, which is not woken by heartbeats.
        if (owner := owner_key(namespace or "", meta)) is not None:
            parts, former = {**meta, **status}, reports.pop(meta["uid"], None)
            report = {name: parts[name] for name in parts.keys() - _IN_HEARTBEATS}
            if type != "DELETED":
                reports[meta["uid"]] = report
            if type == "DELETED" or report != former:
                queue.wake(owner)

    async def child_changed(namespace: str | None, meta: Mapping[str, Any], **_: Any) -> None:
        if (key := owner_key(namespace or "", meta)) is not None:
            queue.wake(key)

    async def stop_working(**_: Any) -> None:
        # This has to run before kopf mistakes the queue's tasks for its own hung ones. kopf would cancel them
        # after five seconds, along with unanswered writes.
        await queue.close()
        await settle()

    kopf.on.login(registry=registry)(login)
    kopf.on.cleanup(registry=registry)(stop_working)
    kopf.on.event(CLUSTER.group, CLUSTER.version, CLUSTER.plural, registry=registry)(cluster_changed)
    for kind in _watched():
        kopf.on.event(
            kind.group, kind.version, kind.plural, labels={MANAGED_BY_LABEL: FIELD_MANAGER}, registry=registry
        )(child_changed)
    return registry


def _watched() -> list[Kind]:
    """Kinds of children to watch, besides LMCacheClusters.

    Kinds that an API server may not serve are left out: kopf would log errors at every start. Each
    reconciliation reads such objects anyway.
    """
    return [kind for kind in kinds_of(COMPONENTS) if kind not in (CLUSTER, *OPTIONAL)]


def _kopf_settings(namespaces: Sequence[str]) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # kopf would drop the watches of a deleted namespace. They report it, and resume when it is created again.
    settings.scanning.disabled = bool(namespaces)
    settings.posting.enabled = False
    # If the process cannot stop in time, it exits, and the kubelet starts it again.
    settings.process.ultimate_exiting_timeout = 20
    # A watch that is silently cut off by the network is noticed after 70 s; ten minutes bound what is left.
    settings.watching.server_timeout = 600
    settings.watching.connect_timeout = 10
    settings.watching.chunk_size = 5  # the metadata of an object may have a megabyte, in a list of each kind
    settings.networking.request_timeout = None  # a refused list waits; `answer` limits each attempt
    settings.networking.connect_timeout = 5
    # The API server filters by label, so the operator never receives other Services and ConfigMaps.
    for kind in _watched():
        selectors = settings.watching.label_selectors
        selectors[kind.group, kind.version, kind.plural] = f"{MANAGED_BY_LABEL}={FIELD_MANAGER}"
    return settings
