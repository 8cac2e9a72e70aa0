"""Time to first token on a real engine at 8,192 prompt tokens: cold, memory hit, remote hit.

Beside it the same engine with no connector: cold (``bare``), and a hit in its own prefix cache (``own hit``),
which copies nothing: no cache outside the engine can be faster.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from benchmarks.report import Figure, Report, at_least, at_most, spread
from tools.engine.process import EngineProcess, connector_config
from tools.processes import RedisServer, SidecarProcess

PROMPT_TOKENS, CHUNK_TOKENS, REPEATS = 8192, 256, 3
ROWS = PROMPT_TOKENS // CHUNK_TOKENS


def prompt(seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(4, 320) for _ in range(PROMPT_TOKENS)]


def ttft(engine: EngineProcess, tokens: list[int], *, is_hit: bool = False) -> float:
    """Seconds. Raises RuntimeError when the cache did not do what is measured: then there is no figure."""
    (answer,) = engine.generate(tokens, max_tokens=1)
    if (answer.num_cached_tokens > 0) is not is_hit:
        raise RuntimeError(f"{answer.num_cached_tokens} tokens came from the cache; is the machine busy?")
    return answer.ttft


def forget_memory(sidecar: SidecarProcess) -> None:
    """Only the remote tier is left: another sidecar, an empty arena. The engine attaches again by itself."""
    sidecar.terminate()
    sidecar.arena_path.unlink()
    sidecar.start()
    sidecar.wait_until(lambda stats: stats["memory"].get("usable_rows") == stats["memory"]["num_rows"])
    sidecar.wait_until(lambda stats: sum(client["is_attached"] for client in stats["clients"]) == 2)


def run() -> Report:
    seconds: dict[str, list[float]] = {
        name: [] for name in ("bare", "own hit", "cold", "memory hit", "remote hit")
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        RedisServer() as redis,
        SidecarProcess(memory_size="512Mi", remote_url=redis.unix_url) as sidecar,
        EngineProcess(Path(folder) / "engine", connector_config(sidecar.socket_path)) as engine,
        EngineProcess(Path(folder) / "bare", enable_prefix_caching=True) as bare,
    ):
        for warm in (engine.wait_ready(), bare.wait_ready()):
            ttft(warm, prompt(REPEATS))
        for repeat in range(REPEATS):
            tokens = prompt(repeat)
            written = sidecar.stats()["remote"]["writes"]["written"]
            seconds["bare"].append(ttft(bare, tokens))
            seconds["own hit"].append(ttft(bare, tokens, is_hit=True))
            seconds["cold"].append(ttft(engine, tokens))
            want = written + ROWS
            sidecar.wait_until(lambda stats, want=want: stats["remote"]["writes"]["written"] >= want)
            seconds["memory hit"].append(ttft(engine, tokens, is_hit=True))
            forget_memory(sidecar)
            seconds["remote hit"].append(ttft(engine, tokens, is_hit=True))
    return Report("vllm", _conditions(seconds), _figures(seconds))


def _conditions(seconds: dict[str, list[float]]) -> str:
    shown = "\n".join(f"  {name:<10}  {spread(samples)}" for name, samples in seconds.items())
    return (
        "vLLM on the CPU, a tiny Llama (fp32, 4 KiB of KV per token), Redis over a UNIX socket;\n"
        f"{PROMPT_TOKENS} prompt tokens, 1 answer token; {REPEATS} prompts, interleaved.\n"
        f"Time to first token, median (min-max):\n{shown}"
    )


def _figures(seconds: dict[str, list[float]]) -> list[Figure]:
    median = {name: statistics.median(samples) for name, samples in seconds.items()}
    return [
        at_most("memory hit, share of cold", 100 * median["memory hit"] / median["cold"], "%", 8),
        at_most("remote hit, share of cold", 100 * median["remote hit"] / median["cold"], "%", 25),
        Figure(
            "memory hit, of a hit in the engine's own cache", median["memory hit"] / median["own hit"], "x"
        ),
        at_least(
            "speed of cold, of an engine with no connector", 100 * median["bare"] / median["cold"], "%", 97
        ),
    ]
