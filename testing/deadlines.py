"""Sets the product's deadlines in this process, and in sidecars and engines that it starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from lmcache_store.common.timing import TIMING, Timing

VARIABLE = "LMCACHE_TIMING"
STANDARD = ""
_OF_SETTINGS = ("row_seconds", "first_row_seconds")
"""Waits of requests for rows. Tests set these in the connector's settings (``patient_config``)."""

PATIENT = ",".join(
    f"{name}={max(60.0, seconds)}" for name, seconds in vars(Timing()).items() if name not in _OF_SETTINGS
)
"""Deadlines for tests of anything else: on a busy machine, a process may get no processor for seconds."""

CALLS = "call_seconds=60"
"""Deadlines for tests in which a process does not answer: the waits of requests end as for users."""

SIMULATED = f"{CALLS},hello_seconds=60"
"""The same for simulated engines, of which each test expects that they attach."""

COPIES = f"{CALLS},hold_seconds=60,left_behind_seconds=60"
"""The same for real engines, whose stores may be late."""


@contextmanager
def deadlines(text: str) -> Iterator[None]:
    """Use ``text``, a value of LMCACHE_TIMING, in this context."""
    former = os.environ.get(VARIABLE, STANDARD)
    os.environ[VARIABLE] = text  # and restore no other variable: vLLM sets some once in a process
    try:
        TIMING.read(text)
        yield
    finally:
        os.environ[VARIABLE] = former
        TIMING.read(former)
