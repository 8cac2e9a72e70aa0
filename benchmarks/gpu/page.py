"""The page of ``make gpu-check``, made from the files of its steps, and its last line."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import results
from benchmarks.gpu.plan import STEPS
from benchmarks.machine import machine
from lmcache_client.cuda.driver import Device

BY_NAME = {step.name: step for step in STEPS}
PASSED, FAILED, LATE, MISSING = "passed", "failed", "stopped at its time limit", "not run"
_INCOMPLETE = "not completely measured"
"""Meaning of a step that was stopped without a problem: it says nothing against this GPU."""


@dataclass(frozen=True)
class Outcome:
    """The end of a step, and what it wrote."""

    step: str
    state: str
    """PASSED, FAILED, LATE or MISSING."""
    seconds: float = 0.0
    why: str = ""
    """Reason if the step did not run."""
    entries: Sequence[Mapping[str, Any]] = ()
    """Lines of the step's file."""


def earlier(folder: Path, steps: Collection[str]) -> list[Outcome]:
    """Return the outcomes of earlier runs in a folder, without those of ``steps``, which run again."""
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    outcomes = [Outcome(**json.loads(line)) for line in lines]
    return [outcome for outcome in outcomes if outcome.step not in steps]


def write(folder: Path, head: dict[str, str], outcomes: list[Outcome], *, is_simulated: bool) -> Path:
    """Write ``gpu-facts.md`` and ``results.jsonl`` into a folder. Returns the page's path."""
    outcomes = sorted(outcomes, key=lambda outcome: list(BY_NAME).index(outcome.step))
    texts = (json.dumps(asdict(outcome)) + "\n" for outcome in outcomes)
    (folder / "results.jsonl").write_text("".join(texts))
    what = "Simulated driver: **no figure here means anything**" if is_simulated else "Measurements on a GPU"
    lines = [f"# {what}", "`make gpu-check` writes this page.\n", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in head.items()]
    lines += ["\n" + _section(outcome).rstrip() for outcome in outcomes]
    page = folder / "gpu-facts.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def _section(outcome: Outcome) -> str:
    text = f"## {outcome.step}: {BY_NAME[outcome.step].what}\n**{outcome.state}**"
    text += f": {outcome.why}" if outcome.why else f" after {outcome.seconds:.0f} s"
    text += f": {_INCOMPLETE}" if _is_incomplete(outcome) else ""
    for problem in results.problems(outcome.entries):
        text += f"\n- {problem.what}: {problem.meaning}"
    return f"{text}\n\n{results.markdown(outcome.entries)}"


def head_of(device: Device) -> dict[str, str]:
    """Return what the page says about the machine."""
    version = device.driver.version
    capability = (str(device.attribute(f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR"))
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "GPU": chip(device),
        "CUDA of the driver": f"{version // 1000}.{version % 1000 // 10}",
        "compute capability": ".".join(capability),
        "copy engines": str(device.attribute("ASYNC_ENGINE_COUNT")),
        "host": machine(),
    }


def chip(device: Device) -> str:
    """Return name, driver and bus from nvidia-smi, or only the name if nvidia-smi is missing."""
    name = device.driver.call("cuDeviceGetName", 64, device.ordinal).split(b"\0")[0].decode()
    if (program := shutil.which("nvidia-smi")) is None:
        return str(name)
    fields = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
    argv = [program, f"--query-gpu={fields}", "--format=csv,noheader", f"--id={device.uuid}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(name)


def _is_incomplete(outcome: Outcome) -> bool:
    """True if a step was stopped at its time limit, and had found no problem until then."""
    return outcome.state == LATE and not results.problems(outcome.entries)


def last_line(outcomes: list[Outcome]) -> str:
    """Return one line that says what failed or was stopped, and what it means for the user."""
    late = [f"{outcome.step} ({LATE}): {_INCOMPLETE}" for outcome in outcomes if _is_incomplete(outcome)]
    bad = [each for each in outcomes if each.state in (FAILED, LATE) and not _is_incomplete(each)]
    parts = []
    for outcome in bad:
        faults = results.problems(outcome.entries)
        what = faults[0].what.splitlines()[0][:160] if faults else outcome.state
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        meaning = faults[0].meaning if faults else BY_NAME[outcome.step].meaning
        parts.append(f"{outcome.step} ({what}{more}): {meaning}")
    failed = [f"{len(bad)} of {len(outcomes)} steps failed: {'; '.join(parts)}"] if bad else []
    verdict = "; ".join(failed + late) or "passed"
    absent = [f"{outcome.step} ({outcome.why})" for outcome in outcomes if outcome.state == MISSING]
    return f"gpu-check: {verdict}" + (f"; not run: {', '.join(absent)}" if absent else "")
