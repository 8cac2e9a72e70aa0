"""The page of ``make gpu-check``, made from the files of its steps, and its last line."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu import results
from benchmarks.gpu.plan import STEPS, Step
from benchmarks.machine import machine
from lmcache.cuda.driver import Device

PASSED, FAILED, LATE, MISSING = "passed", "failed", "stopped at its time limit", "not run"


@dataclass(frozen=True)
class Outcome:
    """The end of a step."""

    step: str
    state: str
    """PASSED, FAILED, LATE or MISSING."""
    seconds: float = 0.0
    why: str = ""
    """Reason if the step did not run."""


def write(folder: Path, head: dict[str, str], outcomes: list[Outcome], *, is_simulated: bool) -> Path:
    """Write ``FOLDER/gpu-facts.md`` and ``FOLDER/steps.json``. Returns the page's path."""
    (folder / "steps.json").write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    what = "Simulated driver: **no figure here means anything**" if is_simulated else "Measurements on a GPU"
    lines = [f"# {what}", "`make gpu-check` writes this page.\n", "| | |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in head.items()]
    by_name = {step.name: step for step in STEPS}
    for outcome in outcomes:
        lines.append("\n" + _section(folder, by_name[outcome.step], outcome).rstrip())
    page = folder / "gpu-facts.md"
    page.write_text("\n".join(lines) + "\n")
    return page


def _section(folder: Path, step: Step, outcome: Outcome) -> str:
    path = folder / f"{step.name}.jsonl"
    text = f"## {step.name}: {step.what}\n**{outcome.state}**"
    text += f": {outcome.why}" if outcome.why else f" after {outcome.seconds:.0f} s"
    for problem in results.problems(path):
        text += f"\n- {problem.what}: {problem.meaning}"
    return f"{text}\n\n{results.markdown(path)}"


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


def last_line(folder: Path, outcomes: list[Outcome]) -> str:
    """Return one line that says what failed, and what it means for the user."""
    by_name = {step.name: step for step in STEPS}
    bad = [outcome for outcome in outcomes if outcome.state in (FAILED, LATE)]
    parts = []
    for outcome in bad:
        faults = results.problems(folder / f"{outcome.step}.jsonl")
        what = faults[0].what.splitlines()[0][:160] if faults else outcome.state
        more = f" and {len(faults) - 1} more" if len(faults) > 1 else ""
        meaning = faults[0].meaning if faults else by_name[outcome.step].meaning
        parts.append(f"{outcome.step} ({what}{more}): {meaning}")
    verdict = f"{len(bad)} of {len(outcomes)} steps failed: {'; '.join(parts)}" if bad else "passed"
    absent = [f"{outcome.step} ({outcome.why})" for outcome in outcomes if outcome.state == MISSING]
    return f"gpu-check: {verdict}" + (f"; not run: {', '.join(absent)}" if absent else "")
