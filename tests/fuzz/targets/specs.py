"""Any LMCacheCluster settles after few writes, or is refused with the name of the field.

Input: random numbers for a walk through the resource's schema. Many results break one value.
"""

from tests.fuzz.bytes_input import InputRandom
from tests.fuzz.event_loop import opened_runner, runner
from tests.fuzz.target import Target
from tests.harness.operator.settled_specs import check
from tests.harness.operator.spec_fuzz import spec_by


def run(data: bytes) -> None:
    generated, _ = spec_by(InputRandom(data))
    check(runner(), generated)


TARGET = Target(run, max_bytes=1024, opened=opened_runner)
