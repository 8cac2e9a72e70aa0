"""The workflows of GitHub: they parse, name actions by commit, and ask for no more than they need."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_by_commit_and_say_their_release(path):
    used = [line.strip(" -") for line in path.read_text().splitlines() if "uses:" in line]
    assert used
    assert [line for line in used if not PINNED.match(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_rights_are_given_by_job_and_jobs_end(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"].get("contents") == "read"
        assert job["timeout-minutes"] <= 90
        assert job["runs-on"] == "ubuntu-24.04"


def test_workflows_run_make_s_targets():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    matrix = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["target"]["strategy"]["matrix"]["target"]
    called = re.findall(r"\bmake ([a-z0-9-]+)", "\n".join(path.read_text() for path in WORKFLOWS))
    assert {*matrix, *called} <= targets
