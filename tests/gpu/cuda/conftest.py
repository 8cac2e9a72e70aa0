"""The driver for these tests: a real one, or the simulated one (integration/test_cuda_driver.py)."""

import os
from pathlib import Path

import pytest

from lmcache_client.cuda.driver import Device, GpuStream
from lmcache_client.cuda.errors import CudaUnavailableError
from testing.cuda import Node


@pytest.fixture(scope="session")
def device():
    try:
        return Device.visible()[0]
    except CudaUnavailableError as error:
        pytest.skip(f"no GPU here ({error})")


@pytest.fixture
def context(device):
    context = device.primary_context()
    yield context
    context.close()


@pytest.fixture
def stream(context):
    stream = GpuStream(context)
    yield stream
    stream.close()


@pytest.fixture
def simulated(device):
    """The simulated node, used by this process alone. Skips tests that need it on a real GPU."""
    if "CUDASIM_NODE" not in os.environ or "LMCACHE_TEST_GPU" in os.environ:
        pytest.skip("the driver is not simulated")
    node = Node(Path(os.environ["CUDASIM_NODE"]))
    yield node
    node.order("")
