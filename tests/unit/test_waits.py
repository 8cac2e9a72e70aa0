"""The check that refuses tests that depend on the speed of the machine."""

import pytest

from tools.waits import problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("time.sleep(0.1)", "time.sleep: wait for a condition"),
        ("await asyncio.sleep(1)", "asyncio.sleep: wait for a condition"),
        ("wait_until(ready, timeout=5)", "timeout=5: use 60 s or more, or no limit"),
        ("assert time.monotonic() - began < 3", "asserts a duration"),
    ],
)
def test_real_time_needs_a_reason(text, problem):
    body = f"async def test_x():\n    {text}\n"
    ((number, message),) = problems(body)
    assert number == 2
    assert message.startswith(problem)
    assert not list(problems(body.replace("\n    ", "\n    # real time: the kernel ends it\n    ")))


@pytest.mark.parametrize(
    "text",
    [
        "async def test_x():\n    await asyncio.sleep(0)",
        "wait_until(ready)",
        "wait_until(ready, timeout=60)",
        "session.lookup(timeout=0)",
        "assert clock.now < 3",
        "from tests.harness import jumping_loop\nasync def x():\n    await asyncio.sleep(9)",
    ],
)
def test_conditions_yields_and_sleeps_of_a_virtual_loop_are_allowed(text):
    assert not list(problems(text))
