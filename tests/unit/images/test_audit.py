"""``make audit``: a service that does not answer is never a clean result."""

import json
import subprocess

import pytest

from tools.provenance import audit

ADVISORY = {"id": "PYSEC-2026-1", "aliases": ["CVE-2026-1"], "fix_versions": ["2.0"]}
CLEAN = {"name": "a", "version": "1", "vulns": []}
VULNERABLE = {"name": "b", "version": "1", "vulns": [ADVISORY]}
SKIPPED = {"name": "c", "skip_reason": "Dependency not found on PyPI"}


def status(monkeypatch, *reports: str) -> int:
    """Exit status for reports about the images, in their order."""
    texts = iter(reports)
    monkeypatch.setattr(audit, "packages", lambda *_: "folder")
    monkeypatch.setattr(
        subprocess, "run", lambda argv, **_: subprocess.CompletedProcess(argv, 0, next(texts), "lost")
    )
    return audit.vulnerability_status("pypi")


def report(*packages: dict) -> str:
    return json.dumps({"dependencies": list(packages)})


def test_answers_for_all_packages_without_vulnerability_are_success(monkeypatch):
    assert status(monkeypatch, *[report(CLEAN)] * 3) == 0


def test_vulnerability_is_named_with_its_remedy(monkeypatch, capsys):
    assert status(monkeypatch, report(CLEAN), report(SKIPPED, VULNERABLE), report(SKIPPED)) == audit.PROBLEM
    assert "VULNERABLE b 1: PYSEC-2026-1 CVE-2026-1. Fixed in: 2.0." in capsys.readouterr().out


def test_skipped_package_is_no_success(monkeypatch, capsys):
    assert status(monkeypatch, report(CLEAN), report(SKIPPED), report(CLEAN)) == audit.NO_ANSWER
    output = capsys.readouterr().out
    assert "NO ANSWER (1). First: c: Dependency not found on PyPI" in output
    assert "Not audited completely" in output


@pytest.mark.parametrize("text", ["", "Traceback", "[]", '{"dependencies": [{}]}'])
def test_failed_audit_is_no_success(monkeypatch, capsys, text):
    assert status(monkeypatch, text, *[report(CLEAN)] * 2) == audit.NO_ANSWER
    assert "operator/requirements.txt: lost" in capsys.readouterr().out
