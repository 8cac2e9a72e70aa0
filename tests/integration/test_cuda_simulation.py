"""The simulated driver breaks the context of a wrong copy.

Tests of a GPU run on this driver (``test_cuda_driver``), and tests of the sidecar's copies give it orders.
They fail if it loses another property, such as handles that depend on the process id.
"""

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache_client.cuda import ipc
from lmcache_client.cuda.copies import CopyBatch
from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.errors import CudaError
from lmcache_client.cuda.pins import Pins
from testing import cuda, cuda_memory, cuda_peers
from testing.cuda_memory import pages
from testing.cuda_peers import open_context, peer

pytestmark = pytest.mark.rotating  # these tests are about the simulation

SIZE = 1 << 20
DATA = np.random.default_rng(0).bytes(SIZE)
INVALID, BROKEN = (1, False), (700, True)


@pytest.fixture
def node() -> Iterator[cuda.Node]:
    with cuda.node() as node:
        yield node


@contextlib.contextmanager
def copying(node):
    """A peer with memory, and the addresses of its memory on the device and on the host."""
    with peer(**node.environment("copier")) as process:
        process.call(open_context)
        device, host = process.call(make_memory)
        yield process, device, host


# ---- functions that peers run ----


def make_memory(state):
    """Half of the memory on the host is pinned."""
    state["device"] = cuda_memory.allocate(state["context"], DATA)
    state["host"] = pages(2 * SIZE)
    state["pins"] = Pins(state["context"], state["host"].ctypes.data, SIZE)
    state["pins"].set_ready(SIZE)
    assert state["pins"].wait(60)
    return state["device"], state["host"].ctypes.data


def failure(state, function, *arguments):
    """The error of a peer's function: its code and whether it is sticky, or its representation."""
    try:
        return function(state, *arguments)
    except CudaError as error:
        return error.code, error.is_sticky
    except Exception as error:
        return repr(error)


def failure_text(state, function, *arguments):
    with pytest.raises(CudaError) as error:
        function(state, *arguments)
    return str(error.value)


def submit(state, to, from_, size=SIZE, *, is_pinned=True):
    batch = CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size)))
    batch.submit(state["stream"], is_pinned=is_pinned)


def synchronize(state):
    state["stream"].synchronize()


def copy(state, *arguments):
    submit(state, *arguments)
    synchronize(state)


def copy_with_pins(state, to, from_, size=SIZE):
    batch = CopyBatch(
        *(np.array([value], np.uint64) for value in (to, from_, size)), edges=state["pins"].edges
    )
    batch.submit(state["stream"], is_pinned=bool(state["pins"].covers(batch.to).all()))
    synchronize(state)
    return bytes(state["host"][to - state["host"].ctypes.data :][:size])


def held(state):
    return bytes(state["host"][:SIZE])


def free_bytes(state):
    return int(state["context"].call("cuMemGetInfo")[0])


def free_device_memory(state):
    state["context"].call("cuMemFree", state["device"])


def unpin(state):
    state["pins"].close()


def pin_slowly_and_copy(state, path, num_bytes, to_copy):
    """Copy the first slot of a large arena whose pins have only begun."""
    with open(path, "rb+") as file:
        arena = np.frombuffer(mmap.mmap(file.fileno(), num_bytes), np.uint8)
    pins = Pins(state["context"], arena.ctypes.data, num_bytes)
    pins.set_ready(num_bytes)
    submit(state, arena.ctypes.data, to_copy, is_pinned=False)
    synchronize(state)
    return bytes(arena[:SIZE]) == DATA and not pins.pinned_bytes


def open_only(state, handle):
    state["mapping"] = state["mappings"].open(handle)
    return len(state["mappings"])


def visible(state):
    return Device.visible()


def export_virtual_memory(state):
    context = state["context"]
    handle = context.call("cuMemCreate", SIZE, context.driver.bindings.CUmemAllocationProp(), 0)
    address = int(context.call("cuMemAddressReserve", SIZE, 0, 0, 0))
    context.call("cuMemMap", address, SIZE, 0, handle, 0)
    result = ipc.is_exportable(context, address), failure(state, lambda _: ipc.export(context, address))
    context.call("cuMemUnmap", address, SIZE)
    return result


# ---- tests ----


@pytest.mark.parametrize("vanish", [free_device_memory, unpin], ids=lambda function: function.__name__)
def test_copying_freed_memory_breaks_the_context(node, vanish):
    """Hardware might read memory that other processes have written meanwhile."""
    with copying(node) as (process, device, host):
        node.order("copier: stall")
        process.call(submit, host, device)
        process.call(vanish)
        node.order("")
        assert process.call(failure, synchronize) == BROKEN
        assert process.call(failure, free_bytes) == BROKEN  # every later call fails, too
        assert node.count("illegal_pieces") == 1


@pytest.mark.parametrize(
    ("to", "from_", "size", "error"),
    [
        pytest.param(("host", 0), ("device", SIZE), 4096, BROKEN, id="behind the allocation"),
        pytest.param(("host", 0), ("device", SIZE - 4096), 8192, BROKEN, id="over its end"),
        pytest.param(("host", 0), ("device", 1 << 40), 1, BROKEN, id="far away"),
        pytest.param(("device", 0), ("nowhere", 4096), 4096, INVALID, id="unmapped host memory"),
        pytest.param(("host", SIZE - 4096), ("device", 0), 8192, INVALID, id="over two registrations"),
    ],
)
def test_wrong_copies_write_nothing(node, to, from_, size, error):
    with copying(node) as (process, device, host):
        bases = {"host": host, "device": device, "nowhere": 0}
        addresses = (bases[base] + offset for base, offset in (to, from_))
        assert process.call(failure, copy, *addresses, size) == error
        assert process.call(held) == bytes(SIZE)
        if error == INVALID:
            process.call(copy, host, device)
            assert process.call(held) == DATA


def test_memory_that_is_not_pinned_is_copied_in_single_pieces(node):
    with peer(**node.environment("copier")) as process:
        process.call(open_context)
        device, host = process.call(make_memory)
        assert process.call(failure, copy, host + SIZE, device) == INVALID, (
            "the caller claims that it is pinned"
        )
        before = node.count("single_copies")
        for target in (host + SIZE, host, host + SIZE, host + SIZE // 2):
            assert process.call(copy_with_pins, target, device) == DATA
        assert (node.count("batches"), node.count("refused_batches")) == (1, 1)
        assert node.count("single_copies") - before == 1 + 1 + 2, "the last target lies in both parts"


def test_pinned_memory_is_copied_in_single_pieces_if_it_has_another_address_on_the_gpu(node):
    with peer(**node.environment("copier", no_host_pointers=1)) as process:
        process.call(open_context)
        device, host = process.call(make_memory)
        before = node.count("single_copies")
        process.call(copy, host, device)
        assert process.call(held) == DATA
        assert (node.count("batches"), node.count("single_copies") - before) == (0, 1)


def test_call_that_the_driver_lacks_is_reported_with_a_remedy(node):
    with peer(**node.environment("copier", missing="cuIpcGetMemHandle")) as process:
        process.call(open_context)
        reason = process.call(failure_text, cuda_peers.export_content, DATA)
        assert "cuIpcGetMemHandle" in reason
        assert "update the NVIDIA driver, or install a version of cuda-bindings" in reason


def test_first_slot_of_a_large_arena_does_not_wait_for_pinning(node, tmp_path):
    arena = tmp_path / "arena"
    with arena.open("wb") as file:
        file.truncate(64 << 30)  # a sparse file: only touched pages use memory
    with copying(node) as (process, device, _):
        node.order("copier: pin_rate 1000")
        assert process.call(pin_slowly_and_copy, arena, 64 << 30, device)


def test_mapping_of_unknown_size_is_closed(node):
    with peer(**node.environment("owner")) as owner, peer(**node.environment("importer")) as importer:
        owner.call(open_context)
        importer.call(open_context)
        exported = owner.call(cuda_peers.export_content, DATA)
        node.order("importer: fail cuMemGetAddressRange 1 1")
        assert importer.call(failure, open_only, exported.handle) == INVALID
        assert node.count("mappings") == 0
        assert importer.call(open_only, exported.handle) == 1


def test_virtual_memory_management_exports_no_handle(node):
    with peer(**node.environment()) as process:
        process.call(open_context)
        assert process.call(export_virtual_memory) == (False, INVALID)


@pytest.mark.parametrize("hidden", ["", "-1", "GPU-9"])
def test_error_says_that_no_gpu_is_visible(node, hidden):
    with peer(**node.environment(), CUDA_VISIBLE_DEVICES=hidden) as process:
        assert "no NVIDIA GPU is visible here" in process.call(failure, visible)
