"""``python -m tests.fuzz.child TARGET FLAGS...``: fuzz one target with Atheris in this process.

The flags and folders are those of libFuzzer.
"""

import gc
import itertools
import logging
import resource
import sys
import time

import atheris

from tests.fuzz.target import MAX_BYTES, MAX_SECONDS, load

INSTRUMENTED = [
    "lmcache",
    "lmcache_store",
    "lmcache_client",
    "lmcache_sidecar",
    "lmcache_operator",
    "lmcache_cli",
]
"""Packages whose coverage guides the fuzzer."""
INPUTS_BETWEEN_COLLECTIONS = 100


def main() -> None:
    """Fuzz until the time is up, or until the first crash. libFuzzer ends the process."""
    name, *flags = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    with atheris.instrument_imports(include=INSTRUMENTED):
        target = load(name)

    with target.opened() as opened:
        target.check(b"", opened)  # imports and caches
        numbers = itertools.count(1)

        def run(data: bytes) -> None:
            if next(numbers) % INPUTS_BETWEEN_COLLECTIONS == 0:
                gc.collect()  # a target may leave cycles that hold large buffers
            before, began = peak_bytes(), time.process_time()
            target.check(data, opened)
            grown, seconds = peak_bytes() - before, time.process_time() - began
            assert grown < MAX_BYTES, f"takes {grown} bytes"
            assert seconds < MAX_SECONDS, f"takes {seconds:.1f} s of the processor"

        atheris.Setup([name, f"-max_len={target.max_bytes}", *flags], run)
        atheris.Fuzz()


def peak_bytes() -> int:
    """Return the largest memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


if __name__ == "__main__":
    main()
