"""``python -m tests.fuzz``: fuzz the targets one after the other, and save each crash for the tests."""

import argparse
import os
import sys

from testing.child_process import REPOSITORY
from testing.packages import InstallationError
from tests.fuzz.environment import package
from tests.fuzz.fuzzing import fuzz
from tests.fuzz.target import names, promise


def main() -> int:
    """Fuzz. Returns the exit status: 1 if a target crashed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", help=f"targets; default: all of {', '.join(names())}")
    parser.add_argument("--seconds", type=int, default=int(os.environ.get("FUZZ_SECONDS") or 60))
    options = parser.parse_args()
    if unknown := set(options.targets) - set(names()):
        parser.error(f"unknown target {', '.join(sorted(unknown))}: choose from {', '.join(names())}")
    if options.seconds < 1:
        parser.error("--seconds (FUZZ_SECONDS) must be 1 or more: libFuzzer takes 0 for no limit")
    try:
        package()
    except (FileNotFoundError, InstallationError) as error:
        say(str(error))
        return 1
    crashes = []
    for name in options.targets or names():
        say(f"{name} for {options.seconds} s: {promise(name)}")
        crashes += fuzz(name, options.seconds, say)
    for path in crashes:
        name = path.relative_to(REPOSITORY)
        say(f"crash saved: {name}. Repair the defect, and commit the file: `make test` runs it from now on")
    say(f"{len(crashes)} crashes")
    return 1 if crashes else 0


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"[fuzz] {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
