"""A fuzz target: code that must cope with any input, and the promise that it keeps.

An input is a **crash** in any of these cases:

- ``run`` raises an exception that ``errors`` does not name.
- ``run`` takes more than ``MAX_SECONDS`` of the processor, or ``MAX_WAIT_SECONDS`` in all.
- ``run`` allocates more than ``MAX_BYTES``.

A target checks stronger promises by assertions of its own.
"""

import contextlib
import importlib
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDER = Path(__file__).parent
SEEDS, CRASHES = FOLDER / "seeds", FOLDER / "crashes"
MAX_SECONDS = 5
"""Longest run of an input, in seconds of the processor. Inputs have a few KiB, and take milliseconds."""
MAX_WAIT_SECONDS = 60
"""Longest run of one input. On a busy machine, a run can wait for seconds."""
MAX_BYTES = 64 << 20
"""Largest memory that one input may take."""


@dataclass(frozen=True)
class Target:
    """One fuzz target. ``run`` gets an input, and the value of ``opened``, which is open meanwhile."""

    run: Callable[..., object]
    errors: tuple[type[BaseException], ...] = ()
    """Exceptions that the code declares for bad input."""
    max_bytes: int = 4096
    """Largest input that the fuzzer generates."""
    opened: Callable[[], contextlib.AbstractContextManager[object]] = field(default=contextlib.nullcontext)

    def check(self, data: bytes, opened: object = None) -> None:
        """Run an input. Raises what the target may not raise."""
        arguments = () if opened is None else (opened,)
        with contextlib.suppress(*self.errors):
            self.run(data, *arguments)

    def check_costs(self, data: bytes, opened: object = None) -> None:
        """Run an input as ``check`` does. Raises AssertionError if it takes too much time or memory."""
        tracemalloc.start()
        began = time.process_time()
        try:
            self.check(data, opened)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert time.process_time() - began < MAX_SECONDS, f"takes more than {MAX_SECONDS} s"
        assert peak < MAX_BYTES, f"takes {peak} bytes"


def names() -> list[str]:
    """Return the names of all targets: the modules in ``targets``."""
    return sorted(path.stem for path in (FOLDER / "targets").glob("*.py"))


def load(name: str) -> Target:
    """Import a target of ``targets``, or the one of a module."""
    target: Target = importlib.import_module(name if "." in name else f"tests.fuzz.targets.{name}").TARGET
    return target


def promise(name: str) -> str:
    """Return the first line of a target's docstring."""
    text = (FOLDER / "targets" / f"{name}.py").read_text()
    return text.removeprefix('"""').partition("\n")[0].removesuffix('"""')


def inputs(name: str) -> Iterator[Path]:
    """Yield the seeds and the saved crashes of a target."""
    for folder in (SEEDS / name, CRASHES / name):
        yield from sorted(path for path in folder.glob("*") if path.is_file())
