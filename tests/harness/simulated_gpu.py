"""Functions that processes on a simulated driver run in its tests."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from lmcache.cuda.copies import CopyBatch
from lmcache.cuda.errors import CudaError
from lmcache.cuda.pins import Pins
from testing import cuda, cuda_memory
from testing.cuda_memory import pages
from testing.cuda_peers import open_context, peer

SIZE = 1 << 20
DATA = np.random.default_rng(0).bytes(SIZE)


@pytest.fixture
def node() -> Iterator[cuda.Node]:
    with cuda.node() as node:
        yield node


def failure(state, function, *arguments):
    """The error of a peer's function: its code and whether it is sticky, or its representation."""
    try:
        return function(state, *arguments)
    except CudaError as error:
        return error.code, error.is_sticky
    except Exception as error:
        return repr(error)


def free_bytes(state):
    return int(state["context"].call("cuMemGetInfo")[0])


def copy(state, to, from_, size=SIZE):
    CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size))).submit(state["stream"])
    state["stream"].synchronize()


def submit(state, to, from_, size=SIZE):
    CopyBatch(*(np.array([value], np.uint64) for value in (to, from_, size))).submit(state["stream"])


def make_memory(state):
    state["device"] = cuda_memory.allocate(state["context"], DATA)
    state["host"] = pages(2 * SIZE)
    state["pins"] = Pins(state["context"], state["host"].ctypes.data, SIZE)
    state["pins"].set_ready(SIZE)
    assert state["pins"].wait(60)
    return state["device"], state["host"].ctypes.data


def held(state):
    return bytes(state["host"][:SIZE])


@contextlib.contextmanager
def copying(node, **settings):
    with peer(**node.environment("copier", **settings)) as process:
        process.call(open_context)
        device, host = process.call(make_memory)
        yield process, device, host
