"""The options of ``bench``, and its output. Both command lines share them."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lmcache.bench import results
from lmcache.bench.client import BenchError, Target
from lmcache.bench.runner import Runner, Settings, busy_targets
from lmcache.bench.workloads import WORKLOADS, Shape

EXIT_INCOMPLETE = 1
ABOUT = """\
Measure what the cache saves: send generated prompts to engines, first cold and then warm.

Workloads: chat (conversations of several turns), documents (questions about long documents), agents (recorded
sessions whose prompts grow). The prompts are random tokens. The engines' caches keep them like other prompts,
and other requests are slower meanwhile. Use it on a cluster without other users.
"""
_BAR = 30
_NUMBERS = {
    "--requests": (48, 1, 100_000, "requests of each workload, sent twice"),
    "--duration": (300, 1, 86_400, "limit of the whole benchmark in seconds"),
    "--concurrency": (4, 1, 48, "sessions at the same time"),
    "--prompt-tokens": (4096, 512, 1_000_000, "tokens of the longest prompt; the model may allow less"),
    "--output-tokens": (16, 1, 10_000, "tokens that a request generates"),
    "--vocabulary": (30_000, 64, 10_000_000, "token ids are below this number"),
}
"""Options with their default, smallest and largest value, and meaning."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that both command lines have."""
    about = "workload; may be repeated (default: all)"
    parser.add_argument("--workload", action="append", choices=[*WORKLOADS], help=about)
    for flag, (default, low, high, about) in _NUMBERS.items():
        kind, help_text = _number(low, high), f"{about} (default: %(default)s)"
        parser.add_argument(flag, type=kind, default=default, metavar="N", help=help_text)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE.json", help="also write results as JSON")
    about = "run without a question, also if the engines serve others"
    parser.add_argument("--yes", action="store_true", help=about)
    about = "show the differences between two results, and send nothing"
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE.json", help=about)


def _number(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low:,} to {high:,}")
        return int(text)

    return number


def runner_for(arguments: argparse.Namespace, targets: Sequence[Target]) -> Runner:
    """Ask the user, and return a benchmark of the targets. Raises BenchError if the user does not agree."""
    if not arguments.yes:
        _confirm(arguments, targets)
    seed = f"{time.time_ns():x}"  # prompts that no cache knows
    shape = Shape(
        arguments.requests, arguments.prompt_tokens, arguments.output_tokens, arguments.vocabulary, seed
    )
    workloads = arguments.workload or [*WORKLOADS]
    settings = Settings(workloads, shape, arguments.concurrency, arguments.duration)
    return Runner(targets, settings, _show_progress)


def _confirm(arguments: argparse.Namespace, targets: Sequence[Target]) -> None:
    """Raise BenchError unless the engines are idle and the user agrees."""
    if busy := busy_targets(targets):
        raise BenchError(f"{busy[0]}. A benchmark would slow them down: add --yes to run it nevertheless")
    number = 2 * arguments.requests * len(arguments.workload or WORKLOADS)
    question = f"Send {number} requests to {', '.join(target.name for target in targets)}?"
    if not sys.stdin.isatty():
        raise BenchError(f"{question} Add --yes to agree")
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise BenchError("nothing was sent")


def _show_progress(name: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        bar = "█" * (_BAR * done // total)
        print(
            f"\r{name:<16} {bar:<{_BAR}} {done}/{total}", end="\n" if done == total else "", file=sys.stderr
        )


def report(arguments: argparse.Namespace, runner: Runner) -> int:
    """Print and write the results so far. Returns the exit status."""
    document = results.document(runner.run)
    if sys.stderr.isatty() and document["problem"]:
        print(file=sys.stderr)  # below the progress bar
    print(*results.table(document), sep="\n")
    if arguments.output:
        _write(arguments.output, json.dumps(document, indent=2) + "\n")
    if document["problem"]:
        print(f"error: {document['problem']}", file=sys.stderr)
        return EXIT_INCOMPLETE
    return 0


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror}") from error


def compare(files: Sequence[Path]) -> int:
    """Print the differences between two results. Raises BenchError."""
    documents: list[Any] = []
    for path in files:
        try:
            documents.append(json.loads(path.read_text(encoding="utf-8")))
            results.read(documents[-1])
        except OSError as error:
            raise BenchError(f"{path}: {error.strerror}") from error
        except ValueError as error:
            raise BenchError(f"{path}: {error}") from error
    try:
        print(*results.compare(*documents), sep="\n")
    except ValueError as error:
        raise BenchError(str(error)) from error
    return 0
