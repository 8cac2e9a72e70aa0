"""Shell completion of ``kubectl lmcache``: kubectl runs ``kubectl_complete-lmcache`` with the typed words.

It prints one suggestion per line, and last a colon with a directive, as the library cobra defines them. This
module imports only what the typed command needs, because a user waits for the answer. Names of objects come
from kubectl itself, which starts faster than the Kubernetes client of Python.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from lmcache_cli.commands import COMMANDS

_NO_FILES, _FILES = 4, 0
"""Directives: whether the shell suggests files if there is no suggestion."""
_KUBECTL_SECONDS = 3.0
_CLUSTER_OPTIONS = ("--namespace", "--context", "--kubeconfig")
_GET = ("get", "--request-timeout=2s", "--output=name")


class Suggestions(NamedTuple):
    """Answers to one press of Tab."""

    texts: Sequence[str]
    """Suggestions, each with a description after a tab, or without."""
    directive: int = _NO_FILES


class Typed(NamedTuple):
    """Words of a command that are complete."""

    options: dict[str, str]
    """Values of options, by the option's longest name."""
    num_positional: int
    pending: argparse.Action | None
    """An option whose value comes next."""


def main() -> int:
    """Print suggestions for the words of the command line. Returns the exit status."""
    words = sys.argv[1:] or [""]
    suggestions = complete(words)
    print(*suggestions.texts, f":{suggestions.directive}", sep="\n")
    return 0


def complete(words: Sequence[str]) -> Suggestions:
    """Return suggestions for the last word, which may be empty."""
    *before, last = words
    if not before:
        listed = [f"{name}\t{about}" for name, about in COMMANDS.items()] if not last.startswith("-") else []
        return Suggestions(_matching(listed or ["--help", "--version"], last))
    if before[0] not in COMMANDS:
        return Suggestions(())
    parser = argparse.ArgumentParser()
    import_module(f"lmcache_cli.commands.{before[0]}").add_arguments(parser)
    typed = _typed(parser, before[1:])
    if typed.pending:
        return _values(typed.pending, typed, last)
    option, has_value, value = last.partition("=")
    action = _options(parser).get(option)
    if has_value and action:
        return _values(action, typed, value)
    if last.startswith("-"):
        return Suggestions(_matching(list(_names_with_help(parser)), last))
    positional = [each for each in _actions(parser) if not each.option_strings]
    if typed.num_positional < len(positional) and positional[typed.num_positional].metavar == "NAME":
        return Suggestions(_matching(_objects(typed, "lmcacheclusters"), last))
    return Suggestions(())


def _actions(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    return parser._actions


def _options(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {name: action for action in _actions(parser) for name in action.option_strings}


def _names_with_help(parser: argparse.ArgumentParser) -> Sequence[str]:
    listed = []
    for action in _actions(parser):
        about = (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""
        listed += [f"{name}\t{about}" for name in action.option_strings if name.startswith("--")]
    return listed


def _typed(parser: argparse.ArgumentParser, words: Sequence[str]) -> Typed:
    known, values = _options(parser), dict[str, str]()
    pending: argparse.Action | None = None
    num_positional = 0
    for word in words:
        if pending:
            values[pending.option_strings[-1]] = word
            pending = None
            continue
        name, has_value, value = word.partition("=")
        action = known.get(name)
        if action and has_value:
            values[action.option_strings[-1]] = value
        elif action and action.nargs is None:  # flags have 0, and options with an optional value "?"
            pending = action
        elif not word.startswith("-"):
            num_positional += 1
    return Typed(values, num_positional, pending)


def _values(action: argparse.Action, typed: Typed, last: str) -> Suggestions:
    """Return values of an option."""
    name = action.option_strings[-1]
    if action.choices:
        return Suggestions(_matching([str(choice) for choice in action.choices], last))
    if name in ("--namespace", "--operator-namespace"):
        return Suggestions(_matching(_objects(typed, "namespaces"), last))
    if name == "--context":
        return Suggestions(_matching(_kubectl(typed, "config", "get-contexts", "--output=name"), last))
    is_file = "FILE" in str(action.metavar)
    return Suggestions((), _FILES if is_file else _NO_FILES)


def _matching(texts: Sequence[str], begin: str) -> list[str]:
    return [text for text in texts if text.startswith(begin)]


def _objects(typed: Typed, kind: str) -> list[str]:
    """Return the names of objects; empty if the API server does not answer."""
    lines = _kubectl(typed, _GET[0], kind, *_GET[1:])
    return [line.rpartition("/")[2] for line in lines]


def _kubectl(typed: Typed, *words: str) -> list[str]:
    chosen = [f"{name}={typed.options[name]}" for name in _CLUSTER_OPTIONS if name in typed.options]
    try:
        done = subprocess.run(
            ["kubectl", *words, *chosen], capture_output=True, text=True, timeout=_KUBECTL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
