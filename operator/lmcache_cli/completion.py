"""Shell completion of ``kubectl lmcache``: kubectl runs ``kubectl_complete-lmcache`` with the typed words.

It prints one suggestion per line, and last a directive of the library cobra: if there is no suggestion, the
shell suggests files. This module imports only what the typed command needs, because a user waits for the
answer. Names of objects come from kubectl itself, which starts faster than the Kubernetes client of Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module

from lmcache_cli.commands import COMMANDS

_DIRECTIVE = ":0"
_KUBECTL_SECONDS = 3.0
_CLUSTER_OPTIONS = ("namespace", "context", "kubeconfig")


def main() -> int:
    """Print suggestions for the words of the command line. Returns the exit status."""
    *before, last = sys.argv[1:] or [""]
    matching = [text for text in suggestions(before, last) if text.startswith(last)]
    print(*matching, _DIRECTIVE, sep="\n")
    return 0


def suggestions(before: Sequence[str], last: str) -> list[str]:
    """Return suggestions for the word ``last``, whose beginning may be typed, after the words ``before``."""
    if not before:
        return [f"{name}\t{about}" for name, about in COMMANDS.items()]
    if before[0] not in COMMANDS:
        return []
    parser = argparse.ArgumentParser(exit_on_error=False, add_help=False, allow_abbrev=False)
    import_module(f"lmcache_cli.commands.{before[0]}").add_arguments(parser)
    if last.startswith("-"):
        return ["--help", *(name for action in parser._actions for name in action.option_strings)]
    option = parser._option_string_actions.get(before[-1])
    has_value = option is not None and option.nargs is None
    try:
        given, _ = parser.parse_known_args(before[1:-1] if has_value else before[1:])
    except argparse.ArgumentError:
        return []
    if option and has_value:
        is_namespace = option.dest.endswith("namespace")
        return _names("namespaces", given) if is_namespace else [*(option.choices or ())]
    return [] if given.name else _names("lmcacheclusters", given)


def _names(kind: str, given: argparse.Namespace) -> list[str]:
    """Return the names of objects; empty if the API server does not answer."""
    chosen = [f"--{name}={value}" for name in _CLUSTER_OPTIONS if (value := getattr(given, name))]
    command = ["kubectl", "get", kind, "--request-timeout=2s", "--output=name", *chosen]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_KUBECTL_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.rpartition("/")[2] for line in done.stdout.split()]


if __name__ == "__main__":
    sys.exit(main())
