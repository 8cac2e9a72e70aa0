"""The commit check reads the messages since the default branch."""

from pathlib import Path

import pytest

from tests.harness.git import commit, git, new_repository
from tools import commits
from tools.commits import Commit


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    commit(new_repository(tmp_path), "README.md", "Refusing nothing of the default branch.")
    return tmp_path


def problems(subject: str, body: str = "Because of a reason.", *paths: str) -> list[str]:
    return list(commits.problems(Commit("0123456789abcdef", subject, body, paths)))


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("Refuse " + "x" * 66, "the subject has 73 characters, the limit is 72"),
        ("Refuse empty chunks.", "the subject ends with a full stop"),
        ("Refused empty chunks", "begin the subject with an imperative, not with 'refused'"),
        ("Refusing empty chunks", "begin the subject with an imperative, not with 'refusing'"),
        ("Refuse empty chunks and rename the tier", "'and rename' joins two changes: make two commits"),
    ],
)
def test_refuses_subjects_that_break_a_rule(subject: str, reason: str) -> None:
    assert problems(subject) == [f"0123456789 {subject!r}: {reason}"]


@pytest.mark.parametrize("body", ["", "\n", "Signed-off-by: A <a@example.com>"])
def test_demands_a_body_for_product_code_only(body: str) -> None:
    (problem,) = problems("Refuse chunks", body, "README.md", "sidecar/lmcache_store/tiers/base.py")
    assert problem.endswith("the commit changes product code, so its body must say why")
    assert problems("Refuse chunks", body, "README.md", "tools/check.py") == []
    assert (
        problems("Refuse chunks", f"Readers expect it.\n\n{body}", "sidecar/lmcache_store/tiers/base.py")
        == []
    )


def test_checks_each_commit_since_the_default_branch(repository: Path) -> None:
    git(repository, "switch", "--quiet", "--create", "topic")
    commit(repository, "sidecar/a.py", "Refuse chunks", "First line.\n\nSecond paragraph.")
    commit(repository, "sidecar/a b.py", "Rename chunks.")
    git(repository, "switch", "--quiet", "main")
    commit(repository, "README.md", "Changed the default branch meanwhile.")
    git(repository, "switch", "--quiet", "topic")
    git(repository, "merge", "--quiet", "-m", "Merging is no change.", "main")
    assert [line.split(": ", 1)[1] for line in commits.all_problems(repository)] == [
        "the subject ends with a full stop",
        "the commit changes product code, so its body must say why",
    ]


@pytest.mark.parametrize(
    ("limit", "files", "is_refused"),
    [
        ("40_001", {}, True),
        ("40_001", {"docs/comparison.md": "a row"}, False),
        ("39_999", {}, False),
    ],
)
def test_limit_of_the_product_rises_only_with_a_row_of_the_comparison(
    repository: Path, limit: str, files: dict[str, str], is_refused: bool
) -> None:
    def write(path: str, text: str) -> None:
        (repository / path).parent.mkdir(exist_ok=True)
        (repository / path).write_text(text)

    write("tools/check.py", "MAX_PRODUCT_LINES = 40_000\n")
    commit(repository, "README.md", "Set the limit")
    git(repository, "checkout", "--quiet", "-b", "change")
    write("tools/check.py", f"MAX_PRODUCT_LINES = {limit}\n")
    for path, text in files.items():
        write(path, text)
    commit(repository, "README.md", "Change the limit")
    assert [line.endswith("row of docs/comparison.md") for line in commits.all_problems(repository)] == (
        [True] if is_refused else []
    )
