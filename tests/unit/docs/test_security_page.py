"""The threat model names tests that exist, and says for each attacker what does not hold."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TEXT = (ROOT / "docs" / "operations" / "security.md").read_text()
TESTS = sorted(set(re.findall(r"`(tests/[^`]+)`", TEXT)))
ATTACKERS = TEXT[TEXT.index("## Attackers") : TEXT.index("## Response times between tenants")]


def is_test(reference: str) -> bool:
    """Whether ``FILE::NAME`` is a test function, or ``FILE`` a file with tests."""
    file, _, name = reference.partition("::")
    path = ROOT / file
    definition = rf"^ *(async )?def {name + '[(]' if name else 'test_'}"
    return path.is_file() and re.search(definition, path.read_text(), re.M) is not None


@pytest.mark.parametrize("reference", TESTS)
def test_named_test_exists(reference: str) -> None:
    assert is_test(reference)
    assert not is_test(f"{reference.partition('::')[0]}::test_absent")


@pytest.mark.parametrize(
    "section", ATTACKERS.split("\n### ")[1:], ids=lambda section: section.splitlines()[0]
)
def test_each_attacker_has_tests_and_limits(section: str) -> None:
    assert "**Does not hold:**" in section
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 3
    assert [row for row in rows if "`tests/" not in row and " see the " not in row] == []


def test_vulnerabilities_are_reported_privately() -> None:
    policy = (ROOT / "SECURITY.md").read_text()
    assert "/security/advisories/new" in policy
    assert "@" not in policy
