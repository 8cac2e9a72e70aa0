"""Simulate the hit ratio of the memory tier on a trace: ``python -m tools.simulate TRACE --sizes 64Gi``.

Prints three hit ratios for each size, which should agree. The first one is that of the tier's own eviction
policy. The second one is that of plain LRU, by exact stack distances. The third one is the estimate of the
miss-ratio curve from a sample.

A trace is a file of JSON lines, gzipped or not, in the format of the Mooncake traces
(https://github.com/kvcache-ai/Mooncake). Each line is one request, in the order of arrival. ``timestamp`` is
in ms. ``hash_ids`` are the prefix hashes of the prompt's blocks, head first. Each object takes
``--block-bytes``, also that of a partly filled block.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_store.common.units import format_size, parse_size
from lmcache_store.curves import Lookup, MissRatioCurve, RecencyStack
from lmcache_store.tiers.policy import LRU


class NoEviction(LRU):
    """A policy that evicts nothing: a full tier refuses new rows."""

    def victims(self, sparing: Hashable = None) -> Iterator[int]:
        return iter(())


POLICIES: dict[str, Callable[[int], LRU]] = {"lru": LRU, "none": NoEviction}
"""Eviction policies of the simulated tier. The argument is the number of rows."""

_DEFAULT_BLOCK_BYTES = "64Mi"  # 512 tokens, 128 KiB of KV each: an 8B model with grouped-query attention


class TraceError(ValueError):
    """A line of the trace is invalid. The message has its number and the reason."""


@dataclass(frozen=True)
class Request:
    """One prompt."""

    seconds: float
    blocks: tuple[int, ...]  # prefix hashes, head first


def read_trace(path: Path) -> Iterator[Request]:
    """Read a trace. Raises TraceError, or OSError if the file can't be read."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for number, line in enumerate(lines, 1):
            try:
                fields = json.loads(line)
                blocks = tuple(int(block) for block in fields["hash_ids"])
                yield Request(float(fields["timestamp"]) / 1000, blocks)
            except (ValueError, TypeError, KeyError) as error:
                raise TraceError(
                    f"{path}, line {number}: timestamp or hash_ids is missing or invalid ({error!r})"
                ) from None


def simulate(requests: Iterable[Request], num_rows: int, policy: LRU) -> float:
    """Return the share of blocks that hit as part of a prefix, in a memory tier of ``num_rows`` rows."""
    rows: dict[int, int] = {}
    blocks: dict[int, int] = {}  # block of each row
    free = list(range(num_rows))
    num_hits = num_accesses = 0
    for request_id, request in enumerate(requests):
        hits = []
        for block in request.blocks:
            if block not in rows:
                break
            hits.append(rows[block])
        num_hits += len(hits)
        num_accesses += len(request.blocks)
        policy.touch(hits, request_id)
        for block in request.blocks[len(hits) :]:
            if block in rows:  # the prompt's head was evicted or refused; the store then finds this block
                continue
            row = free.pop() if free else next(policy.victims(request_id), None)
            if row is None:
                break
            policy.remove(row)
            rows.pop(blocks.pop(row, -1), None)
            rows[block], blocks[row] = row, block
            policy.admit(row, request_id)
    return num_hits / max(1, num_accesses)


def stack_distances(requests: Iterable[Sequence[int]]) -> list[int]:
    """Return the stack distance of each access; 0 for the first access to a key.

    The distance is the number of distinct keys since the last access to the key, including the key. All keys
    of a request are looked up before the first key is touched. The order of touches is the given one, tail
    first.
    """
    stack, distances = RecencyStack(), []
    for keys in requests:
        distances += [max(0, distance) for distance in stack.access(keys, 1)]
    return distances


def tail_first(requests: Iterable[Request]) -> list[tuple[int, ...]]:
    """Return the blocks of each request in the order in which the tiers touch them."""
    return [request.blocks[::-1] for request in requests]


def key_hash(block: int) -> int:
    """Return 64 uniformly distributed bits for a block of a trace."""
    return int.from_bytes(hashlib.sha256(str(block).encode()).digest()[:8], "big")


def estimate(requests: Iterable[Request], block_bytes: int, max_keys: int = 16_000) -> MissRatioCurve:
    """Return the miss-ratio curve of a trace."""
    curve = MissRatioCurve(max_keys)
    hashes: dict[int, int] = {}
    for request in requests:
        keys = [hashes.get(block) or hashes.setdefault(block, key_hash(block)) for block in request.blocks]
        curve.feed([Lookup(request.seconds, keys[::-1], block_bytes)])
        curve.count_accesses(len(keys))
    return curve


@dataclass(frozen=True)
class Point:
    """One size, with its hit ratios."""

    size_bytes: int
    policies: dict[str, float]
    exact: float
    estimated: float
    low: float
    high: float


def curve_points(
    requests: Sequence[Request],
    sizes: Sequence[int],
    block_bytes: int,
    policies: Sequence[str],
    progress: Callable[[str], None] = lambda text: None,
) -> list[Point]:
    """Return the hit ratios at each size."""
    progress("exact stack distances")
    distances = sorted(stack_distances(tail_first(requests)))
    progress("estimate")
    curve = estimate(requests, block_bytes)
    points = []
    for size in sizes:
        progress(f"{format_size(size)} by {', '.join(policies)}")
        num_rows = size // block_bytes
        simulated = {name: simulate(requests, num_rows, POLICIES[name](num_rows)) for name in policies}
        exact = sum(0 < distance <= num_rows for distance in distances) / max(1, len(distances))
        points.append(Point(size, simulated, exact, *curve.hit_ratio(size)))
    return points


def plot(points: Sequence[Point], title: str, path: Path) -> None:
    """Draw the curve. Without matplotlib, raises ImportError that says what to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("--plot needs matplotlib: pip install '.[plot]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    sizes = [point.size_bytes / 2**30 for point in points]
    low, high = ([100 * getattr(point, end) for point in points] for end in ("low", "high"))
    axes.fill_between(sizes, low, high, alpha=0.3, label="estimate, 95 %")
    axes.plot(sizes, [100 * point.exact for point in points], "k-", label="LRU, exact")
    for name in points[0].policies:
        axes.plot(
            sizes, [100 * point.policies[name] for point in points], "o", ms=4, label=f"simulated: {name}"
        )
    axes.set(
        xlabel="memory tier (GiB)",
        ylabel="hit ratio (% of blocks)",
        title=title,
        xscale="log",
        ylim=(0, None),
    )
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)


def _sizes(text: str) -> list[int]:
    return sorted(parse_size(part) for part in text.split(","))


def _default_sizes(requests: Sequence[Request], block_bytes: int) -> list[int]:
    """Return sizes from 1 % of all distinct blocks to all of them."""
    total = len({block for request in requests for block in request.blocks}) * block_bytes
    shares = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
    return [max(block_bytes, int(total * share)) for share in shares]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate", description="Hit ratio of the memory tier per size, on a trace."
    )
    parser.add_argument("trace", type=Path, help="JSON lines (may be gzipped) with timestamp and hash_ids")
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="SIZE,..",
        help="sizes of the tier, such as 16Gi,64Gi (default: 1 to 100 %% of all blocks)",
    )
    parser.add_argument("--block-bytes", type=parse_size, default=_DEFAULT_BLOCK_BYTES, metavar="SIZE",
        help="bytes of KV of one block of the trace (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--policy", choices=POLICIES, action="append", help="eviction policy; may be repeated (default: lru)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the curve to a .png, .svg or .pdf file"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    arguments = _parser().parse_args(argv)
    policies = arguments.policy or ["lru"]
    try:
        requests = list(read_trace(arguments.trace))
        sizes = arguments.sizes or _default_sizes(requests, arguments.block_bytes)
        points = curve_points(requests, sizes, arguments.block_bytes, policies, _progress)
        _show(points, policies)
        if arguments.plot:
            plot(points, arguments.trace.name, arguments.plot)
    except (TraceError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text} ..", end="", file=sys.stderr, flush=True)


def _show(points: Sequence[Point], policies: Sequence[str]) -> None:
    _progress("")
    print(
        "".join(f"{title:>12}" for title in ("size", *policies, "LRU exact", "estimate", "95 % from", "to"))
    )
    for point in points:
        ratios = (*point.policies.values(), point.exact, point.estimated, point.low, point.high)
        print(f"{format_size(point.size_bytes):>12}" + "".join(f"{100 * ratio:>10.2f} %" for ratio in ratios))


if __name__ == "__main__":
    sys.exit(main())
