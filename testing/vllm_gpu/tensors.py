"""Tensors "on the GPU" lie in host memory: calls of torch that name a CUDA device create CPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

_CPU = torch.device("cpu")


def on_cpu(value: Any) -> Any:
    """Return the CPU for a CUDA device, and any other value unchanged."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return _CPU
    if isinstance(value, torch.device) and value.type == "cuda":
        return _CPU
    return value


class _OnCpu(TorchFunctionMode):
    """Rewrites device arguments, and answers questions about pinned memory as a GPU would."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.record_stream:
            return None
        if "device" in options:
            options["device"] = on_cpu(options["device"])
        if options.get("pin_memory"):
            options["pin_memory"] = False
        if func is torch.Tensor.to:
            args = tuple(map(on_cpu, args))
        return func(*args, **options)


class _Generator(torch.Generator):
    """A random generator of the CPU, also for a CUDA device."""

    def __new__(cls, device: Any = _CPU) -> _Generator:
        new: Any = super().__new__
        generator: _Generator = new(cls, on_cpu(device))
        return generator


def emulate() -> None:
    """Put the tensors of all present and future threads of this process on the CPU."""
    mode: Any = _OnCpu()
    mode.__enter__()  # the mode of this thread, until the process ends
    torch.Generator = _Generator  # type: ignore[misc]
    run = threading.Thread.run

    def run_on_cpu(thread: threading.Thread) -> None:
        with _OnCpu():
            run(thread)

    threading.Thread.run = run_on_cpu  # type: ignore[method-assign,assignment]
    init = _device.DeviceContext.__init__  # of `with torch.device("cuda")`

    def init_on_cpu(context: Any, device: Any) -> None:
        init(context, on_cpu(torch.device(device)))

    _device.DeviceContext.__init__ = init_on_cpu  # type: ignore[method-assign,assignment]
