"""Any LMCacheCluster settles after few writes, or is refused with the name of the field.

Input: random numbers for a walk through the resource's schema. Many results break one value.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from tests.fuzz.bytes_input import InputRandom
from tests.fuzz.target import Target
from tests.harness.settled_specs import check
from tests.harness.spec_fuzz import spec_by

_runners: list[asyncio.Runner] = []


@contextlib.contextmanager
def opened() -> Iterator[None]:
    with asyncio.Runner() as runner:
        _runners.append(runner)
        yield
        _runners.remove(runner)


def run(data: bytes) -> None:
    generated, _ = spec_by(InputRandom(data))
    check(_runners[-1], generated)


TARGET = Target(run, (), max_bytes=1024, opened=opened)
