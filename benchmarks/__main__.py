"""Run benchmarks and print their tables: ``python -m benchmarks [NAME...] [--json FILE]``."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.report import Report, table

NAMES = {
    "transfer": "copies of 256 MiB of KV between blocks and arena, compared with memcpy of the same pieces",
    "rpc": "lookup of 128 keys in the shared index and by a call to the sidecar; idle and under load",
    "tiers": "memory tier without copies: time and memory per chunk, payload as a share of the arena",
    "hints": "hits of agents' prompts with truthful and with wrong hints, compared with an LRU",
    "sizing": "autoscaling in a loop with exact tiers, on generated days: cost, changes, surprises",
    "autoscale": "a real operator sizes real sidecars while they serve a trace: cost, changes, predictions",
    "parts": "engines of one and of two parts on traces: hits, waits, failed loads, bytes of relays",
    "lockstep": "tokens of a data-parallel rank while another rank loads hits, with and without waits",
    "engine": "library engine: store and retrieve of 256 MiB of KV, compared with memcpy; a long lookup",
    "remote": "loads and stores of rows of 32 MiB over one connection, compared with bare loops",
    "pods": "rows from the memory of another pod, compared with the same rows from Redis",
    "path": "remote and disk tier through the whole sidecar, compared with bare loops",
    "peer": "comparison with lmcache 0.3.0 and 0.5.6 from the registry; runs only if you name it",
    "operator": "many LMCacheClusters on a real API server: writes, requests and memory of the idle operator",
    "peer_server": "sidecar and connector, compared with lmcache 0.5.6's server; runs only if you name it",
    "peer_sglang": "SGLang over lmcache 0.5.6's server, compared; runs only if you name it",
    "vllm": "real engine: time to first token, cold and of hits; throughput of prompts without hits",
    "sglang": "SGLang: time to first token, throughput of new prompts, copies of pages",
    "nodes": "a hit of an engine with ranks on two nodes, compared with one node; needs root",
    "blend_vllm": "blending in vLLM: time to first token, KL divergence, gaps of other requests",
    "blend_marks": "search for known documents in a prompt, on vLLM's scheduler thread",
    "blend_answers": "blending in vLLM: right answers about documents, later questions of a conversation",
    "blend_isolation": "10,000 blended, exact, announcing and aborted requests: blended KV in exact answers",
    "load": "hits on a busy engine: queued requests, one hot prefix, a new engine",
}


def main() -> int:
    listing = "\n".join(f"  {name:<14} {what}" for name, what in NAMES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=f"Benchmarks (default: all):\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    usual = [name for name in NAMES if not name.startswith("peer")]
    parser.add_argument("names", nargs="*", metavar="NAME", default=usual)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the figures to FILE, and pictures to files next to it",
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}: --help lists all benchmarks")
    reports: list[Report] = []
    for name in args.names:
        print(f"\n== {name}: {NAMES[name]}", flush=True)
        start = time.monotonic()
        report: Report = importlib.import_module(f"benchmarks.{name}").run()
        reports.append(report)
        print(f"{report.conditions}\n")
        print(table(("figure", "measured", "bar", "held"), [figure.row() for figure in report.figures]))
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
