"""``python -m benchmarks [NAME...] [--json FILE]``: runs benchmarks and prints their tables."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

from benchmarks.report import Report, table

NAMES = {
    "transfer": "256 MiB of KV between paged blocks and the arena, against memcpy of the same pieces",
    "rpc": "lookup of 128 keys: read from the index in shared memory, and by a call; idle and under load",
    "tiers": "the memory tier without copies: time and memory per chunk, share of the arena that is payload",
    "stress": "eight threads on one local store for a minute, every byte compared",
    "disk": "store and load of objects on disk, against a bare loop; the index at a start",
    "gil": "longest stall of another thread while bytes are checksummed, stored, loaded and populated",
    "cuda": "a batch of copies of GPU memory: what it costs Python; a large arena that is being pinned",
    "gpu_stores": "what a store costs the engine: copied by the sidecar over CUDA IPC, and by the engine",
    "curves": "miss-ratio curves from samples against exact stack distances, and what they cost",
    "sizing": "autoscalers in a loop with exact tiers, on generated days: cost, changes, surprises",
    "autoscale": "a real operator sizes real sidecars while they serve a trace: cost, changes, predictions",
    "engine": "the library's engine: store and retrieve of 256 MiB of KV against memcpy, a long lookup",
    "serde": "each serde on one chunk of KV: speed of one core, size, error",
    "blend": "what blending loses and saves: KL, answers, time to first token, by selection and ratio",
    "remote": "loads and stores of rows of 32 MiB over one connection, against bare loops on the same Redis",
    "shards": "rows of engines on a Redis that evicts; hits before and after a change of the shards",
    "path": "remote and disk on the sidecar's whole path, against bare loops",
    "peer": "side by side with lmcache 0.3.0 and 0.5.6 from the registry; only when named",
    "operator": "many LMCacheClusters on a real API server: writes, requests and memory at rest",
    "polling": "the operator's poller: 200 clusters of 5 sidecars, what it takes of processor and memory",
    "failover": "two operators: the time until one repairs what the other did not live to repair",
    "peer_server": "the sidecar's path and the connector beside lmcache 0.5.6's server; only when named",
    "hybrid": "time to first token of a model with sliding windows: cold, hit in memory",
    "vllm": "a real engine: time to first token, cold and of hits; throughput of prompts that hit nothing",
    "load": "hits on a busy engine: queueing requests, one hot prefix, an engine that is new",
}


def machine() -> str:
    system = f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores, {system}"


def main() -> int:
    listing = "\n".join(f"  {name:<11} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Benchmarks (default: all):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = [name for name in NAMES if not name.startswith("peer")]
    parser.add_argument("names", nargs="*", metavar="NAME", default=usual)
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures there, pictures beside it"
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}")
    reports: list[Report] = []
    for name in args.names:
        print(f"\n== {name}: {NAMES[name]}", flush=True)
        start = time.monotonic()
        report: Report = importlib.import_module(f"benchmarks.{name}").run()
        reports.append(report)
        print(f"{report.conditions}\n")
        print(table(("what", "measured", "bar", "held"), [figure.row() for figure in report.figures]))
        print(f"\n({time.monotonic() - start:.0f} s on {machine()})", flush=True)
    if args.json:
        document = {"machine": machine(), "reports": [report.to_json() for report in reports]}
        args.json.write_text(json.dumps(document, indent=2) + "\n")
        print(f"wrote {args.json}")
        for report in reports:
            for name, picture in report.pictures.items():
                path = args.json.with_suffix(f".{report.name}-{name}.svg")
                path.write_text(picture, encoding="utf-8")
                print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
