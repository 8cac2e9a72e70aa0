"""``make audit``: look for known vulnerabilities and for licences that are not allowed.

    python -m tools.provenance.audit [--service pypi|osv]

Exit status:

0  no problem in any shipped package
1  a vulnerability or a licence that is not allowed
3  no problem found, but the advisory service did not answer for all packages

pip-audit alone exits with 0 if the service knows no package at all. That is status 3 here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from tools.provenance import licences
from tools.provenance.distributions import IMAGES, ROOT, packages

REQUIREMENTS = ROOT / "tools" / "requirements" / "audit.txt"
SERVICES = ("pypi", "osv")
TIMEOUT_SECONDS = 300
PROBLEM, NO_ANSWER = 1, 3
"""Exit statuses."""


@dataclass
class Answers:
    """Answers of the advisory service about one lock file."""

    num_audited: int = 0
    vulnerabilities: list[str] = field(default_factory=list)
    """Lines that name package, advisory and the fixed versions."""
    unanswered: list[str] = field(default_factory=list)
    """Packages with the reason, or one line for the whole lock file."""


def parse(report: str) -> Answers:
    """Return the answers in pip-audit's JSON report. Raises ValueError if the text is no report."""
    answers = Answers()
    try:
        for package in json.loads(report)["dependencies"]:
            if reason := package.get("skip_reason"):
                answers.unanswered.append(f"{package['name']}: {reason}")
                continue
            answers.num_audited += 1
            for advisory in package["vulns"]:
                fixed = ", ".join(advisory["fix_versions"]) or "no version"
                names = " ".join([advisory["id"], *advisory.get("aliases", [])])
                answers.vulnerabilities.append(
                    f"{package['name']} {package['version']}: {names}. Fixed in: {fixed}."
                )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a report of pip-audit: {error!r}") from error
    return answers


def ask(lock: Path, service: str) -> Answers:
    """Ask the advisory service about all packages of a lock file."""
    folder = packages(REQUIREMENTS.read_text(), "audit")
    argv = [
        sys.executable, "-m", "pip_audit", "--disable-pip", "--require-hashes", "--progress-spinner=off",
        "--timeout=10", "--format=json", f"--vulnerability-service={service}", f"--requirement={lock}",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(folder)}
    name = lock.relative_to(ROOT)
    try:
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
        return parse(done.stdout)
    except subprocess.TimeoutExpired:
        return Answers(unanswered=[f"{name}: pip-audit did not end within {TIMEOUT_SECONDS} s"])
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["pip-audit printed nothing"])[-1]
        return Answers(unanswered=[f"{name}: {reason}"])


def vulnerability_status(service: str) -> int:
    """Print the answers about all images. Returns an exit status."""
    status = 0
    for image in IMAGES:
        answers = ask(ROOT / image / "requirements.txt", service)
        print(f"{image}: the service {service} answered for {answers.num_audited} packages")
        for line in answers.vulnerabilities:
            print(f"  VULNERABLE {line}")
        if answers.unanswered:
            print(f"  NO ANSWER ({len(answers.unanswered)}). First: {answers.unanswered[0]}")
        if answers.vulnerabilities:
            status = PROBLEM
        elif answers.unanswered:
            status = status or NO_ANSWER
    if status == NO_ANSWER:
        print("Not audited completely: the advisory service is unreachable from here, or lacks packages.")
    return status


def licence_status() -> int:
    """Print licences that are not allowed. Returns an exit status."""
    shipped = licences.shipped()
    wrong = list(licences.problems(shipped))
    print(f"licences: {len(shipped)} packages, {len(wrong)} problems")
    for line in wrong:
        print(f"  {line}")
    return PROBLEM if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--service", choices=SERVICES, default="pypi", help="default: %(default)s")
    service = parser.parse_args().service
    return licence_status() or vulnerability_status(service)


if __name__ == "__main__":
    sys.exit(main())
