"""Any LMCacheCluster settles after few writes, or is refused with the name of the field.

Input: random numbers for a walk through the resource's schema. Many results break one value.
"""

import asyncio

from tests.fuzz.bytes_input import InputRandom
from tests.fuzz.target import Target
from tests.harness.operator.settled_specs import check
from tests.harness.operator.spec_fuzz import spec_by


def run(data: bytes, runner: asyncio.Runner) -> None:
    generated, _ = spec_by(InputRandom(data))
    check(runner, generated)


TARGET = Target(run, max_bytes=1024, opened=asyncio.Runner)
