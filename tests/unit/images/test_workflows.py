"""GitHub workflows: they parse, pin actions by commit, and request minimal permissions."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from lmcache_cli.commands import COMMANDS
from tests.fuzz.target import names
from tools.provenance.distributions import IMAGES
from tools.provenance.statement import REPOSITORY

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PINNED = re.compile(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit_with_their_release(path):
    actions = [line.strip(" -") for line in path.read_text().splitlines() if "uses:" in line]
    actions = [line for line in actions if not line.startswith("uses: ./")]
    assert actions
    assert [line for line in actions if not PINNED.match(line)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_own_permissions_and_timeouts(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        # Only the job that creates the release page may write.
        assert job["permissions"].get("contents") == ("write" if "gh release create" in str(job) else "read")
        if "uses" in job:  # a reusable workflow sets the rest in its own jobs
            assert (ROOT / job["uses"]).exists()
            continue
        assert job["timeout-minutes"] <= 90
        assert job["runs-on"] == "ubuntu-24.04"


def test_workflows_run_existing_make_targets():
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    matrix = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["target"]["strategy"]["matrix"]["target"]
    called = re.findall(r"\bmake ([a-z0-9-]+)", "\n".join(path.read_text() for path in WORKFLOWS))
    assert {*matrix, *called} <= targets


def nightly_words(name: str) -> list[str]:
    """Return the words that the jobs of the nightly run pass to make in this variable."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "nightly.yml").read_text())["jobs"]
    arguments = [entry["arguments"] for entry in jobs["target"]["strategy"]["matrix"]["include"]]
    values = re.findall(rf'{name}="([^"]*)"', "\n".join(arguments))
    return " ".join(values).split()


def test_nightly_run_fuzzes_all_targets():
    assert sorted(nightly_words("FUZZ")) == sorted(names())


def test_nightly_run_has_each_test_file_once():
    paths = [path for words in nightly_words("TESTS") for path in ROOT.glob(words)]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("test_*.py"))]
    folders = (ROOT / "tests" / name for name in ("unit", "integration"))
    assert sorted(files) == sorted(file for folder in folders for file in folder.rglob("test_*.py"))


def test_release_needs_tested_main_and_approval():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    job = workflow["jobs"]["release"]
    assert workflow["jobs"][job["needs"]]["uses"] == "./.github/workflows/ci.yml"
    assert job["environment"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert any("merge-base --is-ancestor" in command for command in commands[:1])


def test_release_attests_all_published_artifacts():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    steps = [step for step in workflow["jobs"]["release"]["steps"] if "attest" in step.get("uses", "")]
    digests = {step["with"].get("subject-digest") for step in steps} - {None}
    assert digests == {f"${{{{ steps.release.outputs.{name} }}}}" for name in (*IMAGES, "chart")}
    assert "dist/plugin/*.tar.gz" in {step["with"].get("subject-path") for step in steps}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_commands_are_valid_shell(path):
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job.get("steps", ()):
            subprocess.run(["bash", "-n", "-c", re.sub(r"\${{.*?}}", "x", step.get("run", ""))], check=True)


@pytest.mark.parametrize(
    "path", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem
)
def test_issue_forms_parse_and_name_what_exists(path):
    text = path.read_text()
    form = yaml.safe_load(text)
    commands = re.findall(r"kubectl lmcache (\w+)", text)
    assert set(commands) <= COMMANDS.keys()
    pages = re.findall(rf"{REPOSITORY}/(\S+?)[)\s]", text)
    assert all(
        page == "security/advisories/new" or (ROOT / page.removeprefix("blob/main/")).exists()
        for page in pages
    )
    if path.stem == "config":
        return
    assert {"name", "description", "labels", "body"} == form.keys()
    fields = [part["id"] for part in form["body"] if part["type"] != "markdown"]
    assert len(set(fields)) == len(fields) > 0
    if path.stem == "bug":
        required = {part["id"] for part in form["body"] if part.get("validations", {}).get("required")}
        assert {"report", "versions"} <= required
        assert commands == ["doctor", "report"]


def test_owner_of_all_files_is_a_team_of_the_repositorys_organisation():
    organisation = REPOSITORY.rsplit("/", 2)[1]
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [f"* @{organisation}/maintainers"]


def test_hooks_before_a_commit_use_the_pinned_linter():
    """Another version would format the same code differently."""
    [ruff] = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    pinned = re.findall(r"^ruff==(\S+)", (ROOT / "tools/requirements/dev.txt").read_text(), re.MULTILINE)
    assert [ruff["rev"].removeprefix("v")] == pinned
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]
