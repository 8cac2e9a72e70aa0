"""Distribution of test files over pytest workers."""

import re
from types import SimpleNamespace

import pytest

from tests.harness.distribution import ROOT, pytest_generate_tests, unit_of

INTEGRATION = ROOT / "tests" / "integration"


def test_files_with_the_control_plane_share_a_worker():
    units = {
        path.name: unit_of(str(path.relative_to(ROOT)))
        for path in INTEGRATION.glob("test_*.py")
        if re.search(r"\b(plane|operator_process)\b", path.read_text())
    }
    assert "test_operator.py" in units
    assert len(set(units.values())) == 1, units


def test_other_files_are_distributed_separately():
    for file in ("tests/integration/test_vllm.py", "tests/unit/test_distribution.py", "nowhere.py"):
        assert unit_of(file) == file


@pytest.mark.parametrize(
    ("values", "is_refused"), [({"a", "b"}, True), (frozenset("a"), True), (["b", "a"], False)]
)
def test_sets_of_parameters_are_refused(values, is_refused):
    marks = [pytest.mark.parametrize("name", values).mark]
    definition = SimpleNamespace(nodeid="test_x", iter_markers=lambda _: marks)
    if not is_refused:
        pytest_generate_tests(SimpleNamespace(definition=definition))
        return
    with pytest.raises(pytest.UsageError, match="test_x: sort the set of parameters 'name'"):
        pytest_generate_tests(SimpleNamespace(definition=definition))
