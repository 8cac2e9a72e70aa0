"""Run the CUDA tests on the real driver, then measure the GPU and write a report: ``make gpu-check``.

Exits with 2 if there is no GPU, and with 1 if a test fails.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.__main__ import machine
from benchmarks.gpu import copies, interference, memory
from benchmarks.gpu.section import TINY, Scale, Section
from lmcache.cuda.driver import Device
from lmcache.cuda.errors import CudaUnavailableError

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/gpu",
    "tests/integration/test_sidecar_copies.py",
    "tests/integration/test_sidecar_copy_faults.py",
]
"""Tests for any driver. They skip cases that need the controls of the simulated driver."""
NOT_TESTS = ["tests/integration/test_sidecar_copies.py::test_engine_copies_without_the_driver_or_its_binding"]
OUTPUT = ROOT / "docs" / "reference" / "gpu-facts.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=OUTPUT, help="file of the report (default: %(default)s)"
    )
    parser.add_argument("--no-tests", action="store_true", help="measure, without tests")
    parser.add_argument("--simulated", action="store_true", help="try this program on the simulated driver")
    args = parser.parse_args()
    try:
        device = Device.visible()[0]
    except CudaUnavailableError as error:
        print(f"no GPU here: {error}", file=sys.stderr)
        return 2
    if "CUDASIM_NODE" in os.environ and not args.simulated:
        print(
            "no GPU here: the simulated driver can't measure these figures; try --simulated", file=sys.stderr
        )
        return 2
    tested = "not run" if args.no_tests else run_tests(device)
    if tested is None:
        return 1
    sections = measure(device, TINY if args.simulated else Scale())
    args.output.write_text(report(device, tested, sections, is_simulated=args.simulated))
    print(f"wrote {args.output}")
    return 0


def run_tests(device: Device) -> str | None:
    """Run the tests. Returns the last line of their output, or None if a test failed."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        *TESTS,
        *(f"--deselect={name}" for name in NOT_TESTS),
    ]
    environment = os.environ | {"LMCACHE_TEST_GPU": device.uuid}
    with subprocess.Popen(argv, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout is not None
        last = ""
        for line in tests.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
    return None if tests.returncode else last


def measure(device: Device, scale: Scale) -> list[Section]:
    context = device.primary_context()
    sections = []
    for part in (copies, memory, interference):
        print(f"measuring {part.__name__.rsplit('.', 1)[1]}", flush=True)
        sections += part.measure(context, scale)
    context.close()
    return sections


def report(device: Device, tested: str, sections: list[Section], *, is_simulated: bool) -> str:
    what = "Simulated driver: **no figure here means anything**" if is_simulated else "Measurements on a GPU"
    version = device.driver.version
    facts = {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "GPU": chip(device),
        "CUDA of the driver": f"{version // 1000}.{version % 1000 // 10}",
        "compute capability": ".".join(
            str(device.attribute(f"COMPUTE_CAPABILITY_{part}")) for part in ("MAJOR", "MINOR")
        ),
        "copy engines": str(device.attribute("ASYNC_ENGINE_COUNT")),
        "host": machine(),
        "tests": tested,
    }
    lines = [f"| {name} | {value} |" for name, value in facts.items()]
    head = f"# {what}\n`make gpu-check` generates this page.\n\n| | |\n|---|---|\n" + "\n".join(lines)
    return "\n\n".join([head, *(section.markdown().rstrip() for section in sections)]) + "\n"


def chip(device: Device) -> str:
    """Return name, driver and bus from nvidia-smi, or only the name if nvidia-smi is missing."""
    name = device.driver.call("cuDeviceGetName", 64, device.ordinal).split(b"\0")[0].decode()
    if (program := shutil.which("nvidia-smi")) is None:
        return str(name)
    fields = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total"
    argv = [program, f"--query-gpu={fields}", "--format=csv,noheader", f"--id={device.uuid}"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout.strip() or str(name)


if __name__ == "__main__":
    sys.exit(main())
