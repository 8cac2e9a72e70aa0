"""Device memory shared with another process."""

import os

import pytest

from lmcache_client.cuda import ipc
from lmcache_client.cuda.errors import CudaError
from testing import cuda_memory, cuda_peers

pytestmark = pytest.mark.gpu

SIZE = 4 << 20
DATA = os.urandom(SIZE)


def test_another_process_reads_exported_memory(context):
    address = cuda_memory.allocate(context, DATA)
    exported = ipc.export(context, address + 4096)
    assert (exported.base, exported.offset, len(exported.handle)) == (address, 4096, 64)
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        assert peer.call(cuda_peers.read, exported.handle, exported.offset, 1000) == DATA[4096:5096]
    context.call("cuMemFree", address)


def test_handle_maps_the_whole_allocation_with_the_size_of_the_driver(context):
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        exported = peer.call(cuda_peers.export_content, DATA, 12345)
        mappings = ipc.Mappings(context)
        mapping = mappings.open(exported.handle)
        assert (mapping.num_bytes, exported.num_bytes) == (SIZE, SIZE)
        assert cuda_memory.content(context, mapping.base, SIZE) == DATA
        second_mapping = mappings.open(exported.handle)
        assert second_mapping is mapping
        second_mapping.close()
        assert cuda_memory.content(context, mapping.base, 10) == DATA[:10]
        mapping.close()
        assert not len(mappings)
        with pytest.raises(CudaError):
            context.call("cuMemGetAddressRange", mapping.base)


def test_exporting_process_cannot_open_its_handle(context):
    address = cuda_memory.allocate(context, DATA)
    with pytest.raises(CudaError) as error:
        ipc.Mappings(context).open(ipc.export(context, address).handle)
    assert error.value.code == CudaError.SAME_PID
    assert not error.value.is_sticky
    context.call("cuMemFree", address)


@pytest.mark.parametrize("length", [0, 63, 65])
def test_handle_of_another_length_is_refused(context, length):
    with pytest.raises(ValueError, match="64 bytes"):
        ipc.Mappings(context).open(bytes(length))


def test_handle_of_freed_memory_is_refused(context):
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        exported = peer.call(cuda_peers.export_content, DATA)
        peer.call(cuda_peers.free)
        with pytest.raises(CudaError) as error:
            ipc.Mappings(context).open(exported.handle)
    assert not error.value.is_sticky


def test_mapping_outlives_its_owner(context):
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        mapping = ipc.Mappings(context).open(peer.call(cuda_peers.export_content, DATA).handle)
    assert cuda_memory.content(context, mapping.base, SIZE) == DATA
    mapping.close()


def test_mapping_of_unknown_size_is_closed(context, simulated):
    with cuda_peers.peer() as peer:
        peer.call(cuda_peers.open_context)
        exported = peer.call(cuda_peers.export_content, DATA)
        mappings = ipc.Mappings(context)
        simulated.order("fail cuMemGetAddressRange 1 1")
        with pytest.raises(CudaError, match="cuMemGetAddressRange"):
            mappings.open(exported.handle)
        assert simulated.count("mappings") == 0
        mappings.open(exported.handle).close()


def test_virtual_memory_has_no_handle(context, simulated):
    handle = context.call("cuMemCreate", SIZE, context.driver.bindings.CUmemAllocationProp(), 0)
    address = int(context.call("cuMemAddressReserve", SIZE, 0, 0, 0))
    context.call("cuMemMap", address, SIZE, 0, handle, 0)
    assert not ipc.is_exportable(context, address)
    with pytest.raises(CudaError):
        ipc.export(context, address)
    context.call("cuMemUnmap", address, SIZE)
