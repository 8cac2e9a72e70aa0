"""Lookup of 128 keys, client to sidecar and back, against a bare gRPC echo that moves the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import multiprocessing
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from benchmarks.report import Figure, Report, at_most
from lmcache.rpc import kvcache_pb2 as pb
from lmcache.rpc.client import ClientHello, KVGroup, Role, Session, SidecarClient
from lmcache.tiers.base import Slot
from tools.processes import SidecarProcess, wait_until

NUM_KEYS, CHUNK_BYTES, CALLS, ROUNDS = 128, 4096, 300, 5
PATH = "/echo.Echo/Echo"
KEYS = b"".join(hashlib.sha256(bytes([number])).digest() for number in range(NUM_KEYS))


def echo_server(socket: str, reply: bytes) -> None:
    """As the sidecar serves: grpc.aio, one loop, a UNIX socket; the handler does nothing."""

    async def echo(request: bytes, context: Any) -> bytes:
        return reply

    async def serve() -> None:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("echo.Echo", {"Echo": handler}),)
        )
        server.add_insecure_port(f"unix:{socket}")
        await server.start()
        await server.wait_for_termination()

    asyncio.run(serve())


def attach(sidecar: SidecarProcess, role: Role, engine: bytes) -> tuple[SidecarClient, Session]:
    group = KVGroup(group=0, block_tokens=16, chunk_bytes=CHUNK_BYTES)
    hello = ClientHello(role, engine, hashlib.sha256(b"benchmark").digest(), 256, (group,))
    client = SidecarClient(sidecar.socket_path, hello)
    client.start()
    session: Session = wait_until(lambda: client.session, what="attached")
    return client, session


def fill(worker: Session) -> None:
    """All keys are stored, as an engine does it."""
    reserved = wait_until(lambda: [r for r in worker.reserve(0, KEYS) if r.slot], what="slots")
    slots: list[Slot] = [reservation.slot for reservation in reserved if reservation.slot]
    assert len(slots) == NUM_KEYS, f"{len(slots)} slots"
    with worker.copying():
        worker.commit(slots)


def percentiles(call: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def start_seconds() -> float:
    """From exec until engines can attach and the HTTP port answers."""
    with SidecarProcess(memory_size="64Mi") as sidecar:
        sidecar.terminate()
        began = time.perf_counter()
        sidecar.start()
        return time.perf_counter() - began


def run() -> Report:
    starts = [start_seconds() for _ in range(ROUNDS)]
    engine, spawn = uuid.uuid4().bytes, multiprocessing.get_context("spawn")
    with SidecarProcess(memory_size="64Mi") as sidecar, tempfile.TemporaryDirectory() as folder:
        worker_client, worker = attach(sidecar, Role.WORKER, engine)
        client, session = attach(sidecar, Role.SCHEDULER, engine)
        fill(worker)
        found = session.lookup("request", [(0, KEYS)])
        assert found.num_leased == NUM_KEYS, found
        request = pb.LookupRequest(
            epoch=session.epoch, client_uuid=bytes(16), request_id="request",
            groups=[pb.GroupKeys(group=0, keys=KEYS)],
        )  # fmt: skip
        rows, generations = zip(*found.slots[0], strict=True)
        slots = [pb.GroupSlots(group=0, rows=rows, generations=generations)]
        reply = pb.LookupReply(epoch=session.epoch, num_resident=NUM_KEYS, num_leased=NUM_KEYS, slots=slots)
        socket = str(Path(folder) / "echo.sock")
        server = spawn.Process(target=echo_server, args=(socket, reply.SerializeToString()), daemon=True)
        server.start()
        with grpc.insecure_channel(f"unix:{socket}") as channel:
            echo, payload = channel.unary_unary(PATH), request.SerializeToString()
            echo(payload, wait_for_ready=True, timeout=30)
            seconds: dict[str, list[float]] = {"lookup": [], "echo": []}
            for _ in range(ROUNDS):
                seconds["lookup"] += percentiles(lambda: session.lookup("request", [(0, KEYS)]))
                seconds["echo"] += percentiles(lambda: echo(payload))
        server.terminate()
        client.close()
        worker_client.close()
    size = f"{len(payload)} bytes there, {reply.ByteSize()} back"
    return Report(
        "rpc",
        f"{NUM_KEYS} keys, all leased; {size}; {ROUNDS} x {CALLS} calls, interleaved",
        _figures(seconds, starts),
    )


def _figures(seconds: dict[str, list[float]], starts: list[float]) -> list[Figure]:
    p50 = {name: statistics.median(samples) for name, samples in seconds.items()}
    p99 = {name: statistics.quantiles(samples, n=100)[98] for name, samples in seconds.items()}
    return [
        at_most("p50 of a lookup, of an echo's", p50["lookup"] / p50["echo"], "x", 1.5),
        at_most("sidecar's start, from exec until it listens", statistics.median(starts), "s", 1.0),
        *(Figure(f"{name}, p50", value * 1e6, "us") for name, value in p50.items()),
        *(Figure(f"{name}, p99", value * 1e6, "us") for name, value in p99.items()),
    ]
