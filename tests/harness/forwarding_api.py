"""A stand-in for an API server with a kubelet: it has one cluster with pods, and forwards their ports.

The ports of all pods are those of this machine.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from aiohttp import web

NAMESPACE, NAME = "team", "demo"
_PART_BYTES = 1 << 14


class ForwardingApi:
    """Handlers of the API."""

    def __init__(self, pods: Sequence[Mapping[str, Any]]) -> None:
        self.num_forwards = 0
        self.is_forbidden = False
        self._pods = pods
        metadata = {"name": NAME, "namespace": NAMESPACE, "uid": "u"}
        kind = {"apiVersion": "lmcache.io/v1alpha1", "kind": "LMCacheCluster"}
        self._cluster = {**kind, "metadata": metadata, "spec": {}}

    def application(self) -> web.Application:
        """The routes that commands use."""
        clusters = f"/apis/lmcache.io/v1alpha1/namespaces/{NAMESPACE}/lmcacheclusters/{NAME}"
        application = web.Application()
        application.router.add_get(clusters, self._get_cluster)
        application.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods", self._list_pods)
        application.router.add_get(f"/api/v1/namespaces/{NAMESPACE}/pods/{{pod}}/portforward", self._forward)
        return application

    async def _get_cluster(self, _: web.Request) -> web.Response:
        return web.json_response(self._cluster)

    async def _list_pods(self, request: web.Request) -> web.Response:
        is_for_engines = "lmcache.io/component" in request.query.get("labelSelector", "")
        return web.json_response({"items": list(self._pods) if is_for_engines else []})

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        if self.is_forbidden:
            return web.json_response({"kind": "Status", "message": "forbidden", "reason": "F"}, status=403)
        self.num_forwards += 1
        port = int(request.query["ports"])
        socket = web.WebSocketResponse(protocols=("v4.channel.k8s.io",))
        await socket.prepare(request)
        for channel in (b"\x00", b"\x01"):
            await socket.send_bytes(channel + port.to_bytes(2, "little"))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await socket.send_bytes(b"\x01connection refused")
            await socket.close()
            return socket
        to_pod = asyncio.create_task(_to_pod(socket, writer))
        while data := await reader.read(_PART_BYTES):
            await socket.send_bytes(b"\x00" + data)
        await socket.close()
        to_pod.cancel()
        writer.close()
        return socket


async def _to_pod(socket: web.WebSocketResponse, writer: asyncio.StreamWriter) -> None:
    async for message in socket:
        assert message.data[0] == 0
        writer.write(message.data[1:])
        await writer.drain()
    writer.close()


def pod(number: int, sidecar_port: int, *, is_ready: bool = True) -> dict[str, Any]:
    """An engine pod whose sidecar listens on this port."""
    name = f"{NAME}-engine-{number}"
    sidecar = {"name": "sidecar", "ports": [{"name": "metrics", "containerPort": sidecar_port}]}
    return {
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": name},
        "spec": {"initContainers": [sidecar], "containers": [{"name": "engine"}]},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": str(is_ready)}]},
    }


@contextlib.contextmanager
def served(api: ForwardingApi, folder: Path) -> Iterator[Path]:
    """Serve the API in a thread. Yields a kubeconfig."""
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(api.application(), shutdown_timeout=0.1)
    thread = threading.Thread(target=loop.run_forever, name="stand-in for the API server")
    thread.start()

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    try:
        port = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
            "current-context": "x",
        }
        file = folder / "kubeconfig"
        file.write_text(yaml.safe_dump(json.loads(json.dumps(config))))
        yield file
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
