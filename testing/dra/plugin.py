"""The sockets through which a kubelet finds a driver and requests the devices of claims.

The names of services, the type and the version are those of k8s.io/kubelet v0.36.3, ``pkg/apis``:
``pluginregistration/v1`` and ``dra/v1``. Kubelets support them since Kubernetes 1.34.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, Self

import grpc
from google.protobuf.message import Message

from testing.dra import kubelet_pb2 as pb

logger = logging.getLogger(__name__)

REGISTRATION = "pluginregistration.Registration"
DRA = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
TYPE, VERSION = "DRAPlugin", "v1.DRAPlugin"
_GRACE_SECONDS = 1.0


class DriverError(Exception):
    """A claim that cannot be prepared, or a kubelet that refuses the driver. The message says why."""


class Driver(Protocol):
    """A driver that the plugin serves. Calls may be repeated. A claim's failure must not affect others."""

    name: str

    def prepare(self, namespace: str, name: str, uid: str) -> list[pb.Device]:
        """Prepare the claim's devices for containers. Raises DriverError or OSError."""

    def unprepare(self, uid: str) -> None:
        """Release the devices, also those that an earlier process of the driver prepared. Raises OSError."""

    def registered(self) -> None:
        """Called when the kubelet has registered the driver, possibly again."""


class KubeletPlugin:
    """A driver at its sockets. When the context ends, the kubelet unregisters the driver."""

    def __init__(self, driver: Driver, kubelet_root: Path) -> None:
        """``kubelet_root`` is the kubelet's ``--root-dir``."""
        self.driver = driver
        self.endpoint = kubelet_root / "plugins" / driver.name / "dra.sock"
        self.socket = kubelet_root / "plugins_registry" / f"{driver.name}-reg.sock"
        self._status: pb.RegistrationStatus | None = None
        self._changed = threading.Condition()
        self._servers: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def __enter__(self) -> Self:
        # The kubelet uses the first socket as soon as it finds the second.
        self._serve(
            self.endpoint,
            DRA,
            NodePrepareResources=_handler(pb.Claims, self._prepare),
            NodeUnprepareResources=_handler(pb.Claims, self._unprepare),
        )
        self._serve(
            self.socket,
            REGISTRATION,
            GetInfo=_handler(pb.InfoRequest, self._info),
            NotifyRegistrationStatus=_handler(pb.RegistrationStatus, self._notify),
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.unlink(missing_ok=True)
        for server, threads in reversed(self._servers):
            server.stop(_GRACE_SECONDS).wait()
            threads.shutdown()  # grpc does not wait for its threads
        self.endpoint.unlink(missing_ok=True)

    def wait_registered(self, timeout: float = 60.0) -> None:
        """Wait until the kubelet has registered the driver. Raises DriverError with the kubelet's message."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._status is not None, timeout):
                raise DriverError(f"no kubelet has contacted {self.socket} within {timeout:g} s")
            assert self._status is not None
            if not self._status.plugin_registered:
                raise DriverError(f"the kubelet refused the driver: {self._status.error}")

    def _serve(self, socket: Path, service: str, **handlers: grpc.RpcMethodHandler[Any, Any]) -> None:
        socket.parent.mkdir(parents=True, exist_ok=True)
        socket.unlink(missing_ok=True)
        threads = ThreadPoolExecutor(4)
        server = grpc.server(threads)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        server.add_insecure_port(f"unix:{socket}")
        server.start()
        self._servers.append((server, threads))

    def _info(self, _: pb.InfoRequest) -> pb.PluginInfo:
        return pb.PluginInfo(
            type=TYPE, name=self.driver.name, endpoint=str(self.endpoint), supported_versions=[VERSION]
        )

    def _notify(self, status: pb.RegistrationStatus) -> pb.RegistrationStatusResponse:
        if status.plugin_registered:
            self.driver.registered()
        with self._changed:
            self._status = status
            self._changed.notify_all()
        return pb.RegistrationStatusResponse()

    def _prepare(self, request: pb.Claims) -> pb.PreparedClaims:
        results = {}
        for claim in request.claims:
            try:
                results[claim.uid] = pb.Prepared(
                    devices=self.driver.prepare(claim.namespace, claim.name, claim.uid)
                )
            except (DriverError, OSError) as error:
                logger.warning("Claim %s/%s: %s", claim.namespace, claim.name, error)
                results[claim.uid] = pb.Prepared(error=str(error))
        return pb.PreparedClaims(claims=results)

    def _unprepare(self, request: pb.Claims) -> pb.UnpreparedClaims:
        results = {}
        for claim in request.claims:
            try:
                self.driver.unprepare(claim.uid)
                results[claim.uid] = pb.Unprepared()
            except OSError as error:
                logger.warning("Claim %s/%s: %s", claim.namespace, claim.name, error)
                results[claim.uid] = pb.Unprepared(error=str(error))
        return pb.UnpreparedClaims(claims=results)


def _handler(request_type: type[Message], call: Callable[[Any], Message]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        lambda request, _context: call(request),
        request_type.FromString,
        lambda answer: answer.SerializeToString(),
    )
