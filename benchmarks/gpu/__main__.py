"""Test and measure this project on a GPU: ``make gpu-check``, or ``python -m benchmarks.gpu [STEP...]``.

It needs no network. Each step is a process with a time limit, and writes what it finds at once. The page
``gpu-facts.md`` is written again after each step.

Exit status: 0 if all steps passed, 1 if one failed or was stopped, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from benchmarks.gpu import page, results, shared_files
from benchmarks.gpu.page import FAILED, LATE, MISSING, PASSED, Outcome
from benchmarks.gpu.plan import STEPS, Step, missing

ROOT = Path(__file__).parents[2]
OUTPUT = ROOT / "docs" / "reference" / "gpu-facts.md"
_SHORTEST_SECONDS = 15
_STOP_SECONDS = 15.0
"""Time that a stopped step has to end its children and to remove its files."""
_NEEDED = (("torch", "torch"), ("numpy", "numpy"), ("cuda.bindings", "cuda-bindings"))


def main() -> int:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that no step is left running
    if problem := unusable(args.simulated):
        print(problem, file=sys.stderr)
        return 2
    from lmcache_client.cuda.driver import Device

    folder: Path = args.folder
    folder.mkdir(parents=True, exist_ok=True)
    names = args.steps or [step.name for step in STEPS]
    outcomes: list[Outcome] = []
    before = page.earlier(folder, names)
    head = page.head_of(Device.visible()[0])
    ends_at = time.monotonic() + args.seconds
    with tempfile.TemporaryDirectory(prefix="lmc-gpu-check-") as name:
        for step in (step for step in STEPS if step.name in names):
            print(f"== {step.name}: {step.what}", flush=True)
            outcomes.append(run(step, Path(name), ends_at - time.monotonic(), is_tiny=args.simulated))
            done = outcomes[-1]
            print(f"== {step.name}: {done.state} {done.why or f'after {done.seconds:.0f} s'}", flush=True)
            written = page.write(folder, head, before + outcomes, is_simulated=args.simulated)
            with tarfile.open(folder / "logs.tgz", "w:gz") as archive:
                archive.add(name, "gpu-check")
    if args.page is not None:
        shutil.copy(written, args.page)
    print(f"\nThe page is {args.page or written}. Logs are in {folder / 'logs.tgz'}.")
    line = page.last_line(outcomes)
    (folder / "summary.txt").write_text(line + "\n")
    print(line)
    return 1 if any(outcome.state in (FAILED, LATE) for outcome in outcomes) else 0


def arguments() -> argparse.Namespace:
    steps = "\n".join(f"  {step.name:<8} {step.seconds:>4} s  {step.what}" for step in STEPS)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=f"{__doc__}\nSteps, with their time limits:\n{steps}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("steps", nargs="*", metavar="STEP", help="steps to run (default: all)")
    parser.add_argument(
        "--folder", type=Path, default=Path("/tmp/gpu-check"), help="folder of the results (%(default)s)"
    )
    parser.add_argument("--page", type=Path, help="also copy the page to this file")
    parser.add_argument(
        "--seconds", type=float, default=560, help="time limit of all steps together (%(default)s)"
    )
    parser.add_argument(
        "--simulated", action="store_true", help="try this program on the simulated driver, with tiny sizes"
    )
    args = parser.parse_args()
    if unknown := set(args.steps) - {step.name for step in STEPS}:
        parser.error(f"unknown step {', '.join(sorted(unknown))}: --help lists all steps")
    return args


def unusable(is_simulated: bool) -> str:
    """Return the reason why nothing can be measured here, with the remedy; empty if there is none."""
    if absent := missing(_NEEDED):
        return f"missing: {', '.join(absent)}. {install(absent)}"
    import torch

    from lmcache_client.cuda.driver import Device
    from lmcache_client.cuda.errors import CudaUnavailableError

    try:
        Device.visible()
    except CudaUnavailableError as error:
        return f"no GPU here: {error}"
    if "CUDASIM_NODE" in os.environ and not is_simulated:
        return "no GPU here: the simulated driver can't measure these figures; try --simulated"
    if not is_simulated and not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} can't use the GPU: run with the Python of your engine, PYTHON=/path"
        )
    return ""


def install(distributions: list[str]) -> str:
    """Return the command that installs distributions."""
    return f"Run: {sys.executable} -m pip install {' '.join(distributions)} (no network: make gpu-bundle)"


def run(step: Step, folder: Path, seconds: float, *, is_tiny: bool) -> Outcome:
    """Run a step in its own process group, for at most ``seconds``. Its files are written to ``folder``."""
    if absent := step.missing():
        return Outcome(step.name, MISSING, why=f"missing: {', '.join(absent)}. {install(absent)}")
    if seconds < _SHORTEST_SECONDS:
        return Outcome(step.name, MISSING, why="no time was left")
    limit = min(step.seconds, seconds) * (4 if is_tiny else 1)  # the simulated driver is no yardstick
    argv = [sys.executable, "-m", "benchmarks.gpu.run_step", step.name, str(folder), str(limit - 5)]
    paths = [str(ROOT), str(ROOT / "sidecar"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    began_at = time.monotonic()
    log = folder / "logs" / f"{step.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    argv += ["--tiny"] * is_tiny
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                argv, cwd=ROOT, env=environment, start_new_session=True, stdout=output, stderr=output
            )
            state = _wait(process, limit, log)
    finally:
        if names := shared_files.remove(folder):
            print(f"removed from {shared_files.FOLDER}: {', '.join(names)}", flush=True)
    return Outcome(step.name, state, time.monotonic() - began_at, entries=results.read(folder, step.name))


def _wait(process: subprocess.Popen[bytes], limit: float, log: Path) -> str:
    """Wait for a step, and print its lines of progress. Returns its state."""
    ends_at = time.monotonic() + limit
    try:
        with log.open() as lines:
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
                for line in lines:
                    if line.startswith("["):
                        print(line, end="", flush=True)
                if process.returncode is not None:
                    return FAILED if process.returncode else PASSED
                if time.monotonic() > ends_at:
                    return LATE
    finally:
        process.terminate()  # only the step itself, which ends its children
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # children that outlived the step
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)


if __name__ == "__main__":
    sys.exit(main())
