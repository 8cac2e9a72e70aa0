"""Devices and handles of the simulated driver that are missing, busy or stale."""

import os
import subprocess
import sys

import pytest

from lmcache.cuda import ipc
from lmcache.cuda.driver import Device
from testing import cuda, cuda_memory, cuda_peers
from testing.cuda import GPU, MIG_SLICE, OTHER_GPU
from testing.cuda_peers import open_context, peer
from tests.harness.simulated_gpu import DATA, SIZE, failure, free_bytes, node

__all__ = ["node"]

pytestmark = pytest.mark.rotating  # these tests are about the simulation


# ---- devices ----


def visible(state):
    return [device.uuid for device in Device.visible()]


def find(state, uuid):
    return Device.find(uuid).ordinal


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [GPU, OTHER_GPU, MIG_SLICE]),
        ("1", [OTHER_GPU]),
        (f"{MIG_SLICE},0", [MIG_SLICE, GPU]),
        (OTHER_GPU[:12], [OTHER_GPU]),
        ("0,7,1", [GPU]),
    ],
)
def test_process_sees_the_devices_of_cuda_visible_devices(setting, expected):
    with cuda.node([GPU, OTHER_GPU, MIG_SLICE]) as node:
        environment = node.environment() | ({} if setting is None else {"CUDA_VISIBLE_DEVICES": setting})
        with peer(**environment) as process:
            assert process.call(visible) == expected
            assert process.call(find, expected[-1].lower()) == len(expected) - 1
            hidden = process.call(failure, find, "GPU-" + "9" * 8)
            assert hidden.startswith("DeviceNotVisibleError")


@pytest.mark.parametrize("hidden", ["", "-1", "GPU-9"])
def test_error_says_that_no_gpu_is_visible(node, hidden):
    with peer(**node.environment(), CUDA_VISIBLE_DEVICES=hidden) as process:
        assert "no NVIDIA GPU is visible here" in process.call(failure, visible)


def test_exclusive_device_is_refused_to_a_second_process(node):
    """In exclusive compute mode a device is busy until its context ends, or until the process is killed."""
    environment = node.environment(compute_mode=3)
    with peer(**environment) as first, peer(**environment) as second:
        first.call(open_context)
        assert second.call(failure, open_context) == (46, False)
        first.process.kill()
        first.process.join()
        second.call(open_context)


def test_context_without_free_memory_is_refused(node):
    environment = node.environment(memory=64 << 20, context_bytes=40 << 20)
    with peer(**environment) as first, peer(**environment) as second:
        first.call(open_context)
        assert second.call(failure, open_context) == (2, False)
        first.process.kill()
        first.process.join()
        second.call(open_context)


def open_mapping(state, handle):
    state["mapping"] = state["mappings"].open(handle)


def close_mapping(state):
    state["mapping"].close()


def test_mapping_keeps_memory_of_a_killed_process_in_use(node):
    environment = node.environment(memory=4 * SIZE)
    with peer(**environment) as owner, peer(**environment) as importer, peer(**environment) as restarted:
        for process in (owner, importer, restarted):
            process.call(open_context)
        exported = owner.call(cuda_peers.export_content, DATA * 3)
        importer.call(open_mapping, exported.handle)
        owner.process.kill()
        owner.process.join()
        assert restarted.call(failure, cuda_peers.export_content, DATA * 3) == (2, False)
        importer.call(close_mapping)
        assert restarted.call(free_bytes) == 4 * SIZE
        restarted.call(cuda_peers.export_content, DATA * 3)


# ---- handles ----


def test_virtual_memory_management_exports_no_handle(node):
    with peer(**node.environment()) as process:
        process.call(open_context)
        assert process.call(export_virtual_memory) == (False, (1, False))


def export_virtual_memory(state):
    context = state["context"]
    bindings = context.driver.bindings
    handle = context.call("cuMemCreate", SIZE, bindings.CUmemAllocationProp(), 0)
    address = int(context.call("cuMemAddressReserve", SIZE, 0, 0, 0))
    context.call("cuMemMap", address, SIZE, 0, handle, 0)
    context.call("cuMemcpyHtoD", address, DATA, SIZE)
    assert cuda_memory.content(context, address, SIZE) == DATA
    assert Device.of(address) == context.device
    result = ipc.is_exportable(context, address), failure(state, lambda _: ipc.export(context, address))
    context.call("cuMemUnmap", address, SIZE)
    return result


def free_and_export_again(state, data):
    cuda_peers.free(state)
    return cuda_peers.export_content(state, data)


@pytest.mark.parametrize("same_handles", ["", "1"])
def test_new_mapping_shows_the_new_allocation_at_the_same_address(node, same_handles):
    """A mapping that stays open shows the old bytes. Only a new mapping shows the new bytes."""
    new_content = os.urandom(SIZE)
    environment = node.environment(same_handles=same_handles)
    with peer(**environment) as owner, peer(**environment) as importer:
        owner.call(open_context)
        importer.call(open_context)
        first = owner.call(cuda_peers.export_content, DATA)
        importer.call(open_mapping, first.handle)
        second = owner.call(free_and_export_again, new_content)
        assert second.base == first.base
        assert (second.handle == first.handle) == bool(same_handles)
        if same_handles:  # opening it a second time returns the old mapping
            assert importer.call(cuda_peers.read, second.handle, 0, SIZE) == DATA
        importer.call(close_mapping)
        assert importer.call(cuda_peers.read, second.handle, 0, SIZE) == new_content


_EXPORT = """
import os, sys
from testing import cuda_memory, cuda_peers
state = {}
cuda_peers.open_context(state)
print(os.getpid(), cuda_peers.export_content(state, b"7" * 4096).handle.hex(), flush=True)
sys.stdin.read()
"""
_OPEN = """
import os, sys
from lmcache.cuda.errors import CudaError
from testing import cuda_memory, cuda_peers

for _ in range(int(sys.argv[2])):
    if os.fork():  # the child has another process id
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
state = {}
cuda_peers.open_context(state)
try:
    print(os.getpid(), cuda_peers.read(state, bytes.fromhex(sys.argv[1]), 0, 4).decode())
except CudaError as error:
    print(os.getpid(), error.code)
"""
_NAMESPACE = ["unshare", "--fork", "--pid", "--kill-child"]


@pytest.mark.skipif(
    subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode != 0,
    reason="cannot create PID namespaces",
)
def test_driver_confuses_equal_process_ids_of_two_pid_namespaces(node):
    environment = {**os.environ, **node.environment(), "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(code, *arguments):
        return subprocess.Popen(
            [*_NAMESPACE, sys.executable, "-c", code, *arguments],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    with start(_EXPORT) as exporter:
        pid, handle = exporter.stdout.readline().split()
        assert pid == "1"
        for forks, is_first, answer in ((0, True, "201"), (1, False, "7777")):
            with start(_OPEN, handle, str(forks)) as importer:
                pid, result = importer.stdout.read().split()
                assert (pid == "1", result) == (is_first, answer)
        exporter.stdin.close()
