"""Distribution of test files over pytest workers."""

import re

from tests.harness.distribution import ROOT, unit_of

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
