"""Calls that may change the weights of vLLM's model, and engines in which they need no call."""

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.core import EngineCore

from lmcache_client.vllm.weights import watch_weights

pytestmark = pytest.mark.vllm

SERVER = {
    "distributed_executor_backend": "mp",
    "worker_cls": "vllm.v1.worker.gpu_worker.Worker",
    "worker_extension_cls": "",
}


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process of vLLM's server, in which the executor records its calls."""
    for name in ("collective_rpc", "add_lora"):
        monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))
    process = multiprocessing.current_process()
    monkeypatch.setattr(process, "name", "EngineCore_DP0")
    return process


def watched(changes: list[str], **parallel: Any) -> bool:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**{**SERVER, **parallel}))
    return watch_weights(config, changes.append, changes.append)


def call(method: Any, changes: list[str]) -> list[Any]:
    """Call a method of all workers. Returns the calls of the executor, with the changes known before each."""
    core, calls = object.__new__(EngineCore), list[Any]()

    def collective_rpc(*args: Any) -> list[str]:
        calls.append((*args, len(changes)))
        return ["done"]

    core.model_executor = SimpleNamespace(collective_rpc=collective_rpc)
    assert core.collective_rpc(method, 5.0, (1,), {"a": 2}) == ["done"]
    return calls


def set_weights() -> None:
    """A function that a trainer could send to the workers."""


@pytest.mark.parametrize("method", ["update_weights", "reload_weights", "x" * 1000, set_weights, b"pickled"])
def test_change_is_noted_before_the_call(process: Any, method: Any) -> None:
    changes: list[str] = []
    assert watched(changes)
    assert call(method, changes) == [(method, 5.0, (1,), {"a": 2}, 1)]
    assert changes[0].startswith("vLLM's weights may have changed (call of ")
    assert len(changes[0]) < 200, "the sidecar refuses long reasons"


def test_harmless_call_is_no_change(process: Any) -> None:
    changes: list[str] = []
    assert watched(changes)
    assert call("compute_weight_checksums", changes)
    assert changes == []


def test_adapter_is_noted_before_its_load(process: Any) -> None:
    changes: list[Any] = []
    assert watched(changes)
    core = object.__new__(EngineCore)
    core.model_executor = SimpleNamespace(add_lora=lambda adapter: changes == [adapter])
    assert core.add_lora("adapter") is True


@pytest.mark.parametrize(
    "parallel",
    [
        {"distributed_executor_backend": "external_launcher"},
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": dict},
        {"worker_cls": "trainer.Worker"},
        {"worker_extension_cls": "trainer.WorkerExtension"},
    ],
)
def test_program_that_may_reach_the_model_otherwise_is_not_trusted(process: Any, parallel: Any) -> None:
    changes: list[str] = []
    assert not watched(changes, **parallel)
    call("update_weights", changes)
    assert len(changes) == 1, "its calls count as well"


def test_engine_in_the_process_of_a_program_is_not_trusted(process: Any) -> None:
    process.name = "MainProcess"
    assert not watched([])
