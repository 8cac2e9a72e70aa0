"""One emulated device for ``torch.cuda`` and ``torch.accelerator``. Its work is done when a call returns.

A public function of these modules that this file does not emulate raises NotEmulatedError. So a change of
vLLM's runner that needs another function fails with the name of this function.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

_TOTAL_BYTES = 80 << 30
_FREE_BYTES = 78 << 30


class NotEmulatedError(RuntimeError):
    """The engine uses a function of a GPU that the emulation lacks."""


def refuse(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises NotEmulatedError with its name."""

    def refused(*_: object, **__: object) -> NoReturn:
        raise NotEmulatedError(f"{name} is not emulated: add it to testing/vllm_gpu")

    return refused


class Event:
    """An event that has always happened."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def record(self, *_: object) -> None:
        """Do nothing: all work before it is done."""

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Event) -> float:
        """Milliseconds. Always 1, because callers divide by it."""
        return 1.0


class Stream:
    """A stream without queued work. As a context manager, it is the current stream."""

    cuda_stream = stream_id = device_index = 0
    device = torch.device("cpu")

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_event(self, _: object) -> None:
        """Do nothing: all work is done."""

    wait_stream = wait_event

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        return event or Event()


_STREAM = Stream()
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=_TOTAL_BYTES,
    multi_processor_count=132,
    is_integrated=False,
    L2_cache_size=50 << 20,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block_optin=232448,
    gcnArchName="",
    uuid="11111111-1111-1111-1111-111111111111",
)


@contextlib.contextmanager
def _nothing(*_: object, **__: object) -> Iterator[None]:
    yield


def _returns(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


_MEMORY = {
    "empty_cache": _returns(None),
    "reset_peak_memory_stats": _returns(None),
    "memory_stats": lambda *_: {},
    "memory_allocated": _returns(0),
    "max_memory_allocated": _returns(0),
    "memory_reserved": _returns(0),
    "max_memory_reserved": _returns(0),
}
_COMMON = {
    **_MEMORY,
    "is_available": _returns(True),
    "device_count": _returns(1),
    "synchronize": _returns(None),
    "current_stream": _returns(_STREAM),
    "set_stream": _returns(None),
    "get_device_capability": _returns((9, 0)),
}
_CUDA = {
    **_COMMON,
    "Stream": Stream,
    "Event": Event,
    "init": _returns(None),
    "is_initialized": _returns(True),
    "_is_compiled": _returns(True),
    "_lazy_init": _returns(None),
    "_device_count_nvml": _returns(1),
    "current_device": _returns(0),
    "set_device": _returns(None),
    "device": _nothing,
    "get_device_properties": _returns(PROPERTIES),
    "get_device_name": _returns(PROPERTIES.name),
    "mem_get_info": _returns((_FREE_BYTES, _TOTAL_BYTES)),
    "default_stream": _returns(_STREAM),
    "stream": _nothing,
    "manual_seed": _returns(None),
    "manual_seed_all": _returns(None),
    "is_current_stream_capturing": _returns(False),
    "is_bf16_supported": _returns(True),
    "ipc_collect": _returns(None),
    "current_blas_handle": _returns(0),
}
_ACCELERATOR = {
    **_COMMON,
    "current_accelerator": _returns(torch.device("cuda")),
    "current_device_index": _returns(0),
    "current_device_idx": _returns(0),
    "set_device_index": _returns(None),
    "set_device_idx": _returns(None),
    "device_index": _nothing,
    "empty_host_cache": _returns(None),
    "get_memory_info": _returns((_FREE_BYTES, _TOTAL_BYTES)),
}


def emulate() -> None:
    """Replace the functions of ``torch.cuda`` and ``torch.accelerator`` in this process."""
    _replace(torch.cuda, _CUDA)
    _replace(torch.cuda.memory, {**_MEMORY, "get_allocator_backend": _returns("emulated")})
    _replace(torch.accelerator, _ACCELERATOR)
    torch.Event = Event  # type: ignore[assignment,misc]
    torch.Stream = Stream  # type: ignore[assignment,misc]


def _replace(module: types.ModuleType, functions: Mapping[str, Any]) -> None:
    """Replace the public functions of ``module`` by ``functions``, and refuse those that are missing."""
    for name, value in list(vars(module).items()):
        is_public = isinstance(value, types.FunctionType) and not name.startswith("_")
        if is_public and name not in functions:
            setattr(module, name, refuse(f"{module.__name__}.{name}"))
    for name, value in functions.items():
        setattr(module, name, value)
