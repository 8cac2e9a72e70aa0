"""An engine's rank whose KV lies on a GPU, in a process of its own.

``GpuEngine(sidecar, node)`` starts it; its methods are those of ``Rank``, done there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch

from lmcache.cuda.driver import Device
from lmcache.cuda.ipc import export
from lmcache.engines.core.cuda_copier import CudaCopier
from lmcache.engines.core.layout import Layout
from lmcache.engines.vllm.attach import start_client
from lmcache.rpc.client import ClientHello, KVGroup, Role, SidecarClient
from lmcache.rpc.errors import EngineCopiesError, SidecarError
from lmcache.rpc.hello import Allocation, GroupPages, LayerPages, TransferOffer
from lmcache.rpc.session import BlockCopy, Session
from testing.child_process import REPOSITORY, wait_until
from testing.cuda import GPU, Node
from testing.processes import SidecarProcess
from tests.harness.wire import NAMESPACE, attached, make_keys

LAYERS, BLOCKS, PAGE_BYTES, BLOCKS_PER_ROW, GAP_BYTES = 3, 24, 4096, 4, 512
STRIDE = PAGE_BYTES + GAP_BYTES
ROW_BYTES = BLOCKS_PER_ROW * LAYERS * PAGE_BYTES
ATTEMPTS_SECONDS = 60.0


class Rank:
    """One rank: the first layer has an allocation of its own, the others share one."""

    def __init__(self, socket_path: str, settings: dict[str, Any]) -> None:
        self.device = Device.find(settings.get("gpu", GPU))
        self.context = self.device.primary_context()
        self.settings = settings
        self.num_groups: int = settings.get("num_groups", 1)
        self.num_fillers = 0
        # What the GPU has, to compare with.
        self.host = [np.zeros((layers, BLOCKS, STRIDE), np.uint8) for layers in (1, LAYERS - 1)]
        self.layers = [layer[:, :PAGE_BYTES] for host in self.host for layer in host]
        self.addresses: list[int] = []
        self.allocate()
        self.fill(settings.get("seed", 1))
        self.socket_path = socket_path
        self.client, self.session = self.attach(self.offer())

    def attach(self, offer: TransferOffer) -> tuple[SidecarClient, Session]:
        """With a new client."""
        settings = self.settings
        hello = ClientHello(
            Role.WORKER,
            bytes.fromhex(settings.get("engine", "e" * 32)),
            NAMESPACE,
            256,
            (KVGroup(0, 64, ROW_BYTES), KVGroup(1, 64, PAGE_BYTES))[: self.num_groups],
            num_columns=settings.get("num_columns", 1),
            column=settings.get("column", 0),
            transfer=offer,
        )
        client = start_client(self.socket_path, hello, self.copier_of_rows())
        return client, attached(client)

    def copier_of_rows(self) -> CudaCopier | None:
        """The engine's own copier, if ``settings`` ask for it: what it pins, the client reports."""
        if not self.settings.get("copies"):
            return None
        layers = []
        for host, address in zip(self.host, self.addresses, strict=True):
            memory = (ctypes.c_char * host.nbytes).from_address(address)
            kv = torch.frombuffer(memory, dtype=torch.uint8).view(*host.shape)
            layers += list(kv[..., :PAGE_BYTES])
        return CudaCopier({0: Layout(tuple(layers), BLOCKS_PER_ROW)}, self.device)

    def offer(self) -> TransferOffer:
        """All that the sidecar must know; ``settings`` may say something wrong."""
        if refusal := self.settings.get("refusal"):
            return TransferOffer(self.device.uuid, refusal=refusal)
        exported = [export(self.context, address) for address in self.addresses]
        stride, layer_bytes = STRIDE, BLOCKS * STRIDE
        pages = [
            LayerPages(min(n, 1), max(0, n - 1) * layer_bytes, PAGE_BYTES, stride) for n in range(LAYERS)
        ]
        groups = [GroupPages(0, BLOCKS, BLOCKS_PER_ROW, tuple(pages)), GroupPages(1, BLOCKS, 1, (pages[0],))]
        allocations = tuple(Allocation(one.handle, one.num_bytes) for one in exported)
        if claimed := self.settings.get("claimed_blocks"):  # more than there are
            groups[0] = groups[0]._replace(num_blocks=claimed)
            allocations = tuple(one._replace(num_bytes=1 << 40) for one in allocations)
        offered_gpu = self.settings.get("offered_gpu", self.device.uuid)
        return TransferOffer(offered_gpu, allocations, tuple(groups[: self.num_groups]))

    def fill(self, seed: int) -> None:
        """Other KV from now on."""
        for host, address in zip(self.host, self.addresses, strict=True):
            host[...] = np.random.default_rng(seed).integers(0, 256, host.shape, np.uint8)
            self.context.call("cuMemcpyHtoD", address, host.ctypes.data, host.nbytes)
            seed += 1000

    def copier(self) -> list[Any]:
        """Who copies stores now, and why."""
        return list(self.session.store_copier)

    def store(self, keys: Sequence[int], rows: Sequence[Sequence[int]], timeout: float = 30.0) -> str:
        """Store rows of blocks: "stored", or why it was not. A row of one block is of group 1."""
        groups = [int(len(row) == 1) for row in rows]
        try:
            slots = [
                self.session.reserve(group, make_keys(key))[0].slot
                for key, group in zip(keys, groups, strict=True)
            ]
            if None in slots:
                return "busy"
        except SidecarError as error:
            return f"{type(error).__name__}: {error}"
        copies = [BlockCopy(*copy) for copy in zip(groups, slots, rows, strict=True)]
        with self.session.copying():
            try:
                copied = self.session.copy_blocks(copies, timeout)
            except EngineCopiesError as error:
                self.session.abort([copy.slot for copy in copies])
                return f"engine copies: {error.message}"
            except SidecarError as error:
                outcome = f"{type(error).__name__}"
                try:
                    self.session.abort([copy.slot for copy in copies])
                except SidecarError as also:
                    outcome += f", {type(also).__name__}"
                return outcome
            assert copied == [True] * len(copies)
            for copy in copies:
                assert self._is_in(copy.slot.row, copy.blocks), "other bytes"
            self.session.commit([copy.slot for copy in copies])
        return "stored"

    def is_stored(self, key: int, row: Sequence[int]) -> bool:
        """Does the cache have exactly these blocks under the key?"""
        (slot,) = self.session.index.find(np.frombuffer(make_keys(key), "<u8").reshape(-1, 8)).slots()
        return self.session.holds(slot) and self._is_in(slot.row, row)

    def handles(self) -> list[str]:
        """Of its memory."""
        return [allocation.ipc_handle.hex() for allocation in self.offer().allocations]

    def attach_again(self) -> None:
        """As another client, with the same memory."""
        self.client.close()
        self.client, self.session = self.attach(self.offer())

    def attach_often(self, number: int) -> int:
        """So often, each time until the sidecar copies, and store something."""
        for count in range(number):
            self.attach_again()
            wait_until(lambda: self.session.store_copier.is_sidecar, timeout=ATTEMPTS_SECONDS)
            assert self.store([count + 100], [[0, 1, 2, 3]]) == "stored"
        return number

    def fill_by_itself(self, number: int) -> int:
        """Store so many new rows without the sidecar; how many different slots they were given."""
        rows = set()
        for _ in range(number):
            self.num_fillers += 1
            (reservation,) = self.session.reserve(0, make_keys(10_000 + self.num_fillers))
            assert reservation.slot is not None
            rows.add(reservation.slot.row)
            self.session.view(reservation.slot.row, ROW_BYTES)[...] = 7
            self.session.commit([reservation.slot])
        return len(rows)

    def free_and_attach_again(self) -> None:
        """As another client, with memory that is not there any more."""
        self.client.close()
        offer = self.offer()
        self.free()
        self.client, self.session = self.attach(offer)

    def allocate(self) -> None:
        """KV of zeros, in new memory."""
        self.addresses = [int(self.context.call("cuMemAlloc", host.nbytes)) for host in self.host]

    def free(self) -> None:
        """As if the engine gave its KV back without a word."""
        for address in self.addresses:
            self.context.call("cuMemFree", address)

    def _is_in(self, slot: int, row: Sequence[int]) -> bool:
        """Does the slot hold these blocks, one after the other, each with all layers of its group?"""
        layers = self.layers if len(row) > 1 else self.layers[:1]
        wanted = np.concatenate([layer[block] for block in row for layer in layers])
        return np.array_equal(self.session.view(slot, wanted.nbytes), wanted)


class GpuEngine:
    """A ``Rank`` in a process of its own, in a PID namespace of its own if ``pid`` is given."""

    def __init__(
        self,
        sidecar: SidecarProcess,
        node: Node,
        *,
        pid: int = 0,
        driver: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """``driver``: its settings of the simulated one; ``settings``: those of the rank."""
        command = [
            sys.executable,
            "-m",
            "tests.harness.gpu_engine",
            sidecar.socket_path,
            json.dumps(settings),
        ]
        self._process = subprocess.Popen(
            in_namespace(command, pid) if pid else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=REPOSITORY,
            env=os.environ | node.environment("engine", **(driver or {})) | {"PYTHONPATH": f"{REPOSITORY}"},
            text=True,
        )
        self.pid = 0

    def __enter__(self) -> Self:
        try:
            self.pid = self.ask("pid")
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def tell(self, method: str, *arguments: Any) -> None:
        """Have something done; ``answer`` waits for it."""
        assert self._process.stdin is not None
        print(json.dumps([method, *arguments]), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def ask(self, method: str, *arguments: Any) -> Any:
        self.tell(method, *arguments)
        return self.answer()

    def wait_until_copied_by(self, *, sidecar: bool) -> str:
        """Wait until stores are copied by whom; the reason."""

        def reason() -> str | None:
            is_sidecar, why = self.ask("copier")
            return why if is_sidecar == sidecar and "start" not in why else None

        return str(wait_until(reason, timeout=ATTEMPTS_SECONDS, what=f"copied by the sidecar: {sidecar}"))

    def store_by_sidecar(self, keys: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Have it stored by the sidecar, as soon as that copies (again): the news may be under way."""

        def is_stored() -> bool:
            outcome = self.ask("store", keys, rows)
            assert outcome == "stored" or outcome.startswith("engine copies"), outcome
            return bool(outcome == "stored")

        wait_until(is_stored, timeout=ATTEMPTS_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait: also for all of its PID namespace."""
        self._process.kill()  # also its namespace
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


def in_namespace(command: Sequence[str], pid: int) -> list[str]:
    """The command, in a PID namespace of its own and with this id there; it dies with who started it."""
    script = f'exec 3<&0; echo {pid - 1} > /proc/sys/kernel/ns_last_pid; "$@" <&3 & wait'
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", *command]


def make_sidecar(
    node: Node,
    options: dict[str, Any] | None = None,
    patch: dict[str, float] | None = None,
    **settings: object,
) -> SidecarProcess:
    """Its readers find the simulated driver, with ``settings``; ``patch``: other numbers in
    ``copiers.gpu``.
    """
    sidecar = SidecarProcess(**({"memory_size": "16Mi"} | (options or {})))
    sidecar.environment = node.environment("reader", **settings)
    if patch:
        lines = [f"gpu.{name} = {value}" for name, value in patch.items()]
        imports = ["from lmcache_sidecar.copiers import gpu", "from lmcache_sidecar.command import main"]
        sidecar.program = ["-c", "\n".join([*imports, *lines, "main()"])]
    return sidecar


def new_engine() -> str:
    """The uuid of another engine."""
    return uuid.uuid4().hex


def main(socket_path: str, settings: str) -> None:
    """The process of ``GpuEngine``: one answer per line of standard input."""
    rank = Rank(socket_path, json.loads(settings))
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        if method == "pid":
            found: Any = os.getpid()
        else:
            found = getattr(rank, method)(*arguments)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
