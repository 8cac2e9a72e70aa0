"""One rank of an engine whose KV is on a GPU, in a separate process.

``GpuEngine(sidecar, node)`` starts the process and calls the methods of ``Rank`` in it. The process imports
PyTorch only for a copier of its own, because the import takes most of the start.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.ipc import export
from lmcache_client.rpc.client import SidecarClient
from lmcache_client.rpc.errors import EngineCopiesError, SidecarError
from lmcache_client.rpc.hello import Allocation, ClientHello, GroupPages, LayerPages, Role, TransferOffer
from lmcache_client.rpc.session import BlockCopy, SidecarSession
from lmcache_store.kv_groups import KVGroup
from testing import cuda, deadlines
from testing.child_process import REPOSITORY, SOURCES, ChildProcess, wait_until
from testing.cuda import GPU, Node
from testing.engine import fork_server
from testing.processes import SidecarProcess
from tests.harness.sidecar.wire import NAMESPACE, attached, make_keys

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

LAYERS, BLOCKS, PAGE_BYTES, BLOCKS_PER_ROW, GAP_BYTES = 3, 24, 4096, 4, 512
STRIDE = PAGE_BYTES + GAP_BYTES
ROW_BYTES = BLOCKS_PER_ROW * LAYERS * PAGE_BYTES
_BLOCK_BYTES = 2 << 20
ATTEMPTS_SECONDS = 60.0
_MODULE = "tests.harness.client.gpu_engine"
_fork_server = fork_server.ForkServer(_MODULE, lambda: {"PYTHONPATH": SOURCES}, shares_memory=False)


class Rank:
    """One rank. The first layer has its own allocation, and the other layers share one."""

    def __init__(self, socket_path: str, settings: dict[str, Any]) -> None:
        self.device = Device.find(settings.get("gpu", GPU))
        self.context = self.device.primary_context()
        self.settings = settings
        self.namespace = bytes.fromhex(settings["namespace"])
        self.num_groups: int = settings.get("num_groups", 1)
        self.num_fillers = 0
        # A copy of the GPU's memory, for comparison.
        self.host = [np.zeros((layers, BLOCKS, STRIDE), np.uint8) for layers in (1, LAYERS - 1)]
        self.layers = [layer[:, :PAGE_BYTES] for host in self.host for layer in host]
        # CUDA may put smaller allocations into one block, and an importer maps the block.
        sizes = [max(host.nbytes, _BLOCK_BYTES) for host in self.host]
        self.addresses = [int(self.context.call("cuMemAlloc", size)) for size in sizes]
        self.fill(settings.get("seed", 1))
        self.socket_path = socket_path
        self.client, self.session = self.attach(self.offer())

    def attach(self, offer: TransferOffer) -> tuple[SidecarClient, SidecarSession]:
        """Attach a new client."""
        settings = self.settings
        hello = ClientHello(
            Role.WORKER,
            bytes.fromhex(settings.get("engine", "e" * 32)),
            self.namespace,
            256,
            (KVGroup(0, 64, ROW_BYTES), KVGroup(1, 64, PAGE_BYTES))[: self.num_groups],
            num_columns=settings.get("num_columns", 1),
            column=settings.get("column", 0),
            transfer=offer,
        )
        if settings.get("copies"):
            client = self.start_with_copier(hello)
        else:
            client = SidecarClient(self.socket_path, hello)
            client.start()
        return client, attached(client)

    def start_with_copier(self, hello: ClientHello) -> SidecarClient:
        """Start a client that also copies by itself, and reports what it has pinned."""
        import torch

        from lmcache_client.core.cuda_copier import CudaCopier
        from lmcache_client.core.layout import Layout
        from lmcache_client.vllm.attach import start_client

        layers = []
        for host, address in zip(self.host, self.addresses, strict=True):
            memory = (ctypes.c_char * host.nbytes).from_address(address)
            kv = torch.frombuffer(memory, dtype=torch.uint8).view(*host.shape)
            layers += list(kv[..., :PAGE_BYTES])
        copier = CudaCopier({0: Layout(tuple(layers), BLOCKS_PER_ROW)}, self.device)
        return start_client(self.socket_path, hello, copier)

    def offer(self) -> TransferOffer:
        """The transfer offer for the sidecar. ``settings`` may make it wrong."""
        if refusal := self.settings.get("refusal"):
            return TransferOffer(self.device.uuid, refusal=refusal)
        exported = [export(self.context, address) for address in self.addresses]
        stride, layer_bytes = STRIDE, BLOCKS * STRIDE
        pages = [
            LayerPages(min(n, 1), max(0, n - 1) * layer_bytes, PAGE_BYTES, stride) for n in range(LAYERS)
        ]
        groups = [GroupPages(0, BLOCKS, BLOCKS_PER_ROW, tuple(pages)), GroupPages(1, BLOCKS, 1, (pages[0],))]
        allocations = tuple(Allocation(export_.handle, export_.num_bytes) for export_ in exported)
        if claimed := self.settings.get("claimed_blocks"):  # more blocks than exist
            groups[0] = replace(groups[0], num_blocks=claimed)
            allocations = tuple(replace(allocation, num_bytes=1 << 40) for allocation in allocations)
        offered_gpu = self.settings.get("offered_gpu", self.device.uuid)
        return TransferOffer(offered_gpu, allocations, tuple(groups[: self.num_groups]))

    def fill(self, seed: int) -> None:
        """Replace the KV by other random bytes."""
        for host, address in zip(self.host, self.addresses, strict=True):
            host[...] = np.random.default_rng(seed).integers(0, 256, host.shape, np.uint8)
            self.context.call("cuMemcpyHtoD", address, host.ctypes.data, host.nbytes)
            seed += 1000

    def key_of(self, number: int) -> bytes:
        return make_keys(number, namespace=self.namespace)

    def copier(self) -> list[Any]:
        """The current copier of stores, with the reason."""
        return list(self.session.store_copier)

    def store(self, keys: Sequence[int], rows: Sequence[Sequence[int]], timeout: float = 30.0) -> str:
        """Store rows of blocks. Returns "stored" or a reason. Rows of one block are of group 1."""
        groups = [int(len(row) == 1) for row in rows]
        try:
            slots = [
                self.session.reserve(group, self.key_of(key))[0].slot
                for key, group in zip(keys, groups, strict=True)
            ]
            if None in slots:
                self.session.abort([slot for slot in slots if slot is not None])
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
                except SidecarError as abort_error:
                    outcome += f", {type(abort_error).__name__}"
                return outcome
            assert copied == [True] * len(copies)
            for copy in copies:
                assert self._is_in(copy.slot.row, copy.blocks), "the sidecar copied wrong bytes"
            self.session.commit([copy.slot for copy in copies])
        return "stored"

    def is_stored(self, key: int, row: Sequence[int]) -> bool:
        """Whether the cache holds exactly these blocks under the key."""
        (slot,) = self.session.index.find(np.frombuffer(self.key_of(key), "<u8").reshape(-1, 8)).slots()
        return self.session.holds(slot) and self._is_in(slot.row, row)

    def handles(self) -> list[str]:
        """IPC handles of this rank's memory."""
        return [allocation.ipc_handle.hex() for allocation in self.offer().allocations]

    def attach_again(self) -> None:
        """Attach again as a new client, with the same memory."""
        self.client.close()
        self.client, self.session = self.attach(self.offer())

    def fill_by_itself(self, number: int) -> int:
        """Store ``number`` new rows without the sidecar's copies. Returns the number of different slots.

        The sidecar refuses a row while it computes the checksums of all others.
        """
        rows = set()
        for _ in range(number):
            self.num_fillers += 1
            key = self.key_of(10_000 + self.num_fillers)
            slot = wait_until(lambda key=key: self.session.reserve(0, key)[0].slot)
            rows.add(slot.row)
            self.session.view(slot.row, ROW_BYTES)[...] = 7
            self.session.commit([slot])
        return len(rows)

    def _is_in(self, slot: int, row: Sequence[int]) -> bool:
        """Whether the slot holds these blocks in order, each with all layers of its group."""
        layers = self.layers if len(row) > 1 else self.layers[:1]
        expected = np.concatenate([layer[block] for block in row for layer in layers])
        return np.array_equal(self.session.view(slot, expected.nbytes), expected)


class GpuEngine:
    """A ``Rank`` in a separate process, with a PID namespace of its own if ``pid`` is given.

    Where ``fork_server.allowed`` allows it, the process starts as a copy of a fork server.
    """

    def __init__(
        self,
        sidecar: SidecarProcess,
        node: Node,
        *,
        pid: int = 0,
        driver: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """``driver``: settings of the simulated driver. ``settings``: settings of the rank."""
        # First: the node may skip the test, and then nothing is open.
        env = os.environ | node.environment("engine", **(driver or {})) | {"PYTHONPATH": SOURCES}
        self._process = ChildProcess("the engine", sidecar.folder / "engines.log")
        requests, answers = os.pipe(), os.pipe()
        self._requests, self._answers = os.fdopen(requests[1], "w"), os.fdopen(answers[0])
        ends = requests[0], answers[1]
        arguments = [sidecar.socket_path, json.dumps({"namespace": NAMESPACE.hex()} | settings)]
        options: dict[str, Any] = {"cwd": str(REPOSITORY), "env": env, "pass_fds": ends}
        if fork_server.is_allowed() and not pid:
            copy = _fork_server.start(_MODULE, arguments, self._process.log_path, **options)
            self._process.adopt(copy)
        else:
            command = [sys.executable, "-m", _MODULE, *map(str, ends), *arguments]
            self._process.spawn(in_namespace(command, pid) if pid else command, **options)
        for descriptor in ends:
            os.close(descriptor)
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

    def start_call(self, method: str, *arguments: Any) -> None:
        """Start a call. ``answer`` waits for its result."""
        print(json.dumps([method, *arguments]), file=self._requests, flush=True)

    def answer(self) -> Any:
        line = self._answers.readline()
        if not line:  # the process closes the pipe before it writes its error into the log
            raise AssertionError(f"the engine has ended with {self._process.wait()}: {self._process.log}")
        return json.loads(line)

    def ask(self, method: str, *arguments: Any) -> Any:
        self.start_call(method, *arguments)
        return self.answer()

    def wait_until_copied_by(self, *, sidecar: bool) -> str:
        """Wait until stores are copied by the sidecar, or by the engine. Returns the reason."""

        def reason() -> str | None:
            is_sidecar, text = self.ask("copier")
            return text if is_sidecar == sidecar and "start" not in text else None

        return str(wait_until(reason, timeout=ATTEMPTS_SECONDS, what=f"copied by the sidecar: {sidecar}"))

    def store_by_sidecar(self, keys: Sequence[int], rows: Sequence[Sequence[int]]) -> None:
        """Store rows by the sidecar, once it copies, and the arena has memory for them."""

        def is_stored() -> bool:
            outcome = self.ask("store", keys, rows)
            assert outcome in ("stored", "busy") or outcome.startswith("engine copies"), outcome
            return bool(outcome == "stored")

        wait_until(is_stored, timeout=ATTEMPTS_SECONDS)

    def kill(self) -> None:
        """Kill the process and its PID namespace with SIGKILL, and wait."""
        self._process.kill()
        for stream in (self._requests, self._answers):
            stream.close()


def in_namespace(command: Sequence[str], pid: int) -> list[str]:
    """The command in a new PID namespace with this id there. It ends with its parent."""
    script = f'echo {pid - 1} > /proc/sys/kernel/ns_last_pid; "$@" & wait'
    return ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script, "sh", *command]


def make_sidecar(
    node: Node, options: dict[str, Any] | None = None, timing: str = "", **settings: object
) -> SidecarProcess:
    """A sidecar whose readers use the simulated driver with ``settings``. ``timing`` sets its deadlines."""
    environment = node.environment("reader", **settings)  # first: it may skip the test, and leaves nothing
    sidecar = SidecarProcess(**({"memory_size": "16Mi"} | (options or {})))
    sidecar.environment = environment
    if timing:
        sidecar.environment[deadlines.VARIABLE] = timing
    return sidecar


def new_engine() -> str:
    """The uuid of a new engine."""
    return uuid.uuid4().hex


def main(requests: str, answers: str, socket_path: str, settings: str) -> None:
    """Run the process of ``GpuEngine``: one answer for each line of a pipe."""
    cuda.load_driver()
    with os.fdopen(int(requests)) as lines, os.fdopen(int(answers), "w") as output:
        rank = Rank(socket_path, json.loads(settings))
        for line in lines:
            method, *arguments = json.loads(line)
            result = os.getpid() if method == "pid" else getattr(rank, method)(*arguments)
            print(json.dumps(result), file=output, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
