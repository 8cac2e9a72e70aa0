"""Fixtures for tests that run a real sidecar."""

from collections.abc import Iterator

import pytest
import torch

from testing import deadlines
from testing.engine import fork_server
from testing.processes import RedisProcess, SidecarProcess
from tests.harness.engine import attach, connect, scheduler, sidecar
from tests.harness.sglang.fixtures import (
    _sglang_buffered,
    _sglang_engine,
    sglang,
    sglang_buffered,
    sglang_engine,
    sglang_programs,
    start_sglang,
)

__all__ = [
    "_sglang_buffered",
    "_sglang_engine",
    "attach",
    "connect",
    "scheduler",
    "sglang",
    "sglang_buffered",
    "sglang_engine",
    "sglang_programs",
    "sidecar",
    "start_sglang",
]


@pytest.fixture(scope="module")
def shared_redis() -> Iterator[RedisProcess]:
    """A Redis for all tests of a module. They neither stop nor configure it."""
    with RedisProcess() as server:
        yield server


@pytest.fixture
def empty_redis(shared_redis: RedisProcess) -> RedisProcess:
    """The Redis of the module, without keys."""
    with shared_redis.client as client:
        client.flushall()
    return shared_redis


@pytest.fixture(scope="module", autouse=True)
def _forked_engines() -> Iterator[None]:
    """Start engines as copies of a process that has imported vLLM. The first engine starts that process.

    The scope is a module and not the session: a worker may run unit tests next, which start other programs
    in place of vLLM.
    """
    with fork_server.allowed():
        yield


@pytest.fixture(scope="module", autouse=True)
def _patient(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let processes take a minute for each answer: one of them may get no processor for seconds.

    A module that tests what happens without an answer sets ``DEADLINES``.
    """
    text = getattr(request.module, "DEADLINES", deadlines.PATIENT)
    with deadlines.deadlines(text), pytest.MonkeyPatch.context() as patch:
        patch.setattr(SidecarProcess, "usual", SidecarProcess.usual | {"remote_timeout_seconds": 60})
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Run PyTorch on one thread. On tiny models, a team of threads stalls when one of its cores is busy."""
    num_threads_before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads_before)
