"""The sockets by which a kubelet finds a driver and asks it for the devices of claims.

Names of services, the type and the version are those of k8s.io/kubelet v0.36.3, ``pkg/apis``:
``pluginregistration/v1`` and ``dra/v1``. A kubelet knows them since Kubernetes 1.34.
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
    """A claim that can't be prepared, or a kubelet that does not take the driver; the message says why."""


class Driver(Protocol):
    """What the plugin serves. Each call may be repeated, and one claim's failure is its own."""

    name: str

    def prepare(self, namespace: str, name: str, uid: str) -> list[pb.Device]:
        """Make the claim's devices ready for containers. Raises DriverError; OSError."""

    def unprepare(self, uid: str) -> None:
        """Take them back, also those that a driver before this one prepared. Raises OSError."""

    def registered(self) -> None:
        """The kubelet has taken the driver, perhaps again."""


class KubeletPlugin:
    """A driver at its sockets. A context manager: at its end the kubelet forgets the driver."""

    def __init__(self, driver: Driver, kubelet_root: Path) -> None:
        """``kubelet_root`` is the kubelet's ``--root-dir``."""
        self.driver = driver
        self.endpoint = kubelet_root / "plugins" / driver.name / "dra.sock"
        self.socket = kubelet_root / "plugins_registry" / f"{driver.name}-reg.sock"
        self._status: pb.RegistrationStatus | None = None
        self._changed = threading.Condition()
        self._servers: list[tuple[grpc.Server, ThreadPoolExecutor]] = []

    def __enter__(self) -> Self:
        # The kubelet looks for the first as soon as it sees the second.
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
            threads.shutdown()  # grpc does not wait for them
        self.endpoint.unlink(missing_ok=True)

    def wait_registered(self, timeout: float = 60.0) -> None:
        """Until the kubelet has taken the driver. Raises DriverError with the kubelet's words."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._status is not None, timeout):
                raise DriverError(f"no kubelet has looked at {self.socket} within {timeout:g} s")
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

    def _prepare(self, asked: pb.Claims) -> pb.PreparedClaims:
        found = {}
        for claim in asked.claims:
            try:
                found[claim.uid] = pb.Prepared(
                    devices=self.driver.prepare(claim.namespace, claim.name, claim.uid)
                )
            except (DriverError, OSError) as error:
                logger.warning("Claim %s/%s: %s", claim.namespace, claim.name, error)
                found[claim.uid] = pb.Prepared(error=str(error))
        return pb.PreparedClaims(claims=found)

    def _unprepare(self, asked: pb.Claims) -> pb.UnpreparedClaims:
        found = {}
        for claim in asked.claims:
            try:
                self.driver.unprepare(claim.uid)
                found[claim.uid] = pb.Unprepared()
            except OSError as error:
                logger.warning("Claim %s/%s: %s", claim.namespace, claim.name, error)
                found[claim.uid] = pb.Unprepared(error=str(error))
        return pb.UnpreparedClaims(claims=found)


def _handler(request: type[Message], call: Callable[[Any], Message]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        lambda asked, _context: call(asked), request.FromString, lambda answer: answer.SerializeToString()
    )
