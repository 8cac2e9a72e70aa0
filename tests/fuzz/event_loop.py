"""The event loop of a fuzz target that calls coroutines. All its inputs share the loop."""

import asyncio
import contextlib
from collections.abc import Iterator

_runners: list[asyncio.Runner] = []


@contextlib.contextmanager
def opened_runner() -> Iterator[asyncio.Runner]:
    """Open a loop, which ``runner`` returns in this context."""
    with asyncio.Runner() as runner:
        _runners.append(runner)
        try:
            yield runner
        finally:
            _runners.remove(runner)


def runner() -> asyncio.Runner:
    """Return the runner of the innermost ``opened_runner``."""
    return _runners[-1]
