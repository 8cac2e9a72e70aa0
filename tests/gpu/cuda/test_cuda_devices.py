"""GPUs of this machine, and contexts on them."""

import ctypes
from concurrent import futures

import pytest

from lmcache_client.cuda import driver
from lmcache_client.cuda.driver import Device
from lmcache_client.cuda.errors import CudaError, DeviceNotVisibleError
from testing import cuda_memory

pytestmark = pytest.mark.gpu


def test_device_is_found_by_its_uuid(device):
    assert device.uuid[:4] in {"GPU-", "MIG-"}
    assert Device.find(device.uuid) == device
    assert Device.find(device.uuid.upper().replace("GPU-", "GPU-")) == device
    assert all(Device.find(visible.uuid) == visible for visible in Device.visible())


@pytest.mark.parametrize(("uuid", "name"), [("GPU-0", "GPU GPU-0"), ("MIG-0", "the MIG slice MIG-0")])
def test_error_names_the_hidden_device_and_the_visible_ones(device, uuid, name):
    with pytest.raises(DeviceNotVisibleError, match=f"{name} is not visible here; visible: {device.uuid}"):
        Device.find(uuid)


def test_device_of_an_address_is_found(context, device):
    address = cuda_memory.allocate(context, b"x" * 4096)
    assert Device.of(address + 4095) == device
    context.call("cuMemFree", address)
    host = ctypes.create_string_buffer(16)
    assert Device.of(ctypes.addressof(host)) is None


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None), (None, None)])
def test_numa_node_is_that_of_the_slot(device, text, node, tmp_path, monkeypatch):
    slot = device.driver.call("cuDeviceGetPCIBusId", 32, device.ordinal).split(b"\0")[0].decode()
    if text is not None:
        (tmp_path / slot.lower()).mkdir()
        (tmp_path / slot.lower() / "numa_node").write_text(text)
    monkeypatch.setattr(driver, "_PCI_DEVICES", tmp_path)
    assert device.numa_node == node


def test_context_is_current_only_inside_its_with_block(context):
    def is_current():
        return bool(int(context.driver.call("cuCtxGetCurrent")))

    def observe():
        observed = [is_current()]
        with context:
            observed.append(is_current())
            with context:
                pass
            observed.append(is_current())
        return [*observed, is_current()]

    with futures.ThreadPoolExecutor(1) as new_thread:  # torch leaves a context on threads that use it
        assert new_thread.submit(observe).result() == [False, True, True, False]


def test_errors_name_the_call_and_its_code(context):
    with pytest.raises(CudaError, match=r"cuMemFree: CUDA_ERROR_INVALID_VALUE \(1\)") as error:
        context.call("cuMemFree", 12345)
    assert (error.value.function, error.value.code) == ("cuMemFree", 1)
    assert not error.value.is_sticky
