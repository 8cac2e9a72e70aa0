"""The choice of tests for a change."""

import pytest

from tests.harness.git import commit, git, new_repository
from tools import changed_tests
from tools.changed_tests import DOCS, MAX_INTEGRATION, PROCESSES, changed_paths, may_break_docs
from tools.sources import ROOT


@pytest.fixture
def repository(tmp_path):
    """Two commits on main."""
    new_repository(tmp_path)
    commit(tmp_path, "operator/edited.py")
    commit(tmp_path, "sidecar/deleted.py")
    return tmp_path


@pytest.fixture(scope="module")
def graph():
    return changed_tests.import_graph()


def test_a_change_is_all_that_differs_from_the_base(repository):
    (repository / "operator/edited.py").write_text("other")
    (repository / "sidecar/deleted.py").unlink()
    (repository / "untracked.py").touch()
    git(repository, "mv", "operator/edited.py", "operator/moved.py")
    expected = ["operator/edited.py", "operator/moved.py", "sidecar/deleted.py", "untracked.py"]
    assert changed_paths("HEAD", repository) == expected
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "change")
    assert changed_paths("HEAD", repository) == []
    assert changed_paths("HEAD~1", repository) == expected


@pytest.mark.parametrize(
    ("path", "test", "reason"),
    [
        ("tests/unit/tiers/test_policy.py", "unit/tiers/test_policy", "changed"),
        ("tests/unit/tiers/conftest.py", "unit/tiers/test_policy", "tests tests/unit/tiers/conftest.py"),
        (
            "sidecar/lmcache_store/tiers/policy.py",
            "unit/tiers/test_policy",
            "imports lmcache_store.tiers.policy",
        ),
        (
            "sidecar/lmcache_sidecar/daemon.py",
            "integration/test_sidecar_process",
            "tests sidecar/lmcache_sidecar/",
        ),
        ("charts/lmcache-operator/values.yaml", "integration/test_chart", "tests charts/"),
    ],
)  # fmt: skip
def test_chooses_a_test_and_says_why(graph, path, test, reason):
    files, _ = changed_tests.chosen([path], graph)
    assert files[f"tests/{test}.py"] == reason


def test_chooses_tests_through_other_modules_but_leaves_distant_integration_tests_out(graph):
    files, num_left_out = changed_tests.chosen(
        ["sidecar/lmcache_store/common/units.py", "LICENSE", "removed.py"], graph
    )
    assert any(reason.endswith("steps") for reason in files.values())
    assert sum(path.startswith("tests/integration/") for path in files) == MAX_INTEGRATION
    assert num_left_out > 0


@pytest.mark.parametrize("prefix", sorted({*PROCESSES, *DOCS}))
def test_tables_name_existing_paths_and_tests(prefix):
    assert list(ROOT.glob(f"{prefix.rstrip('/')}*"))
    assert all(list((ROOT / "tests").glob(f"{glob}.py")) for glob in PROCESSES.get(prefix, ()))


@pytest.mark.parametrize(("path", "expected"), [("docs/a.md", True), ("operator/edited.py", False)])
def test_branch_may_break_the_tests_of_the_documentation(repository, path, expected):
    assert may_break_docs(repository), "the branch has no known begin"
    git(repository, "switch", "--quiet", "--create", "change")
    commit(repository, "lmcache.py")
    assert not may_break_docs(repository)
    (repository / path).parent.mkdir(exist_ok=True)
    (repository / path).write_text("other")
    assert may_break_docs(repository) is expected
