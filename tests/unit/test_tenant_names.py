"""Names of tenants: the definition of the LMCacheCluster and the tenants file accept the same names."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.errors import InvalidSpecError
from lmcache_sidecar.files.tenants import TenantsFile
from lmcache_store.tenant_names import DEFAULT_NAME, MAX_CHARACTERS, is_name
from tests.harness.operator.model import cluster

HASH = "a" * 64
VALID = ["a", "0", "search", "batch-2", "a--b", "a" * MAX_CHARACTERS]
INVALID: list[Any] = [
    "", "A", "-a", "a-", "a.b", "a_b", "a b", "a\n", "ä", "٣", "a" * (MAX_CHARACTERS + 1), None, 7,
]  # fmt: skip


def is_declarable(name: Any) -> bool:
    """Whether the spec of an LMCacheCluster may have the name."""
    try:
        parse(cluster(tenants={"named": [{"name": name, "saltHash": HASH}]}))
    except InvalidSpecError:
        return False
    return True


def is_usable(name: Any, path: Any) -> bool:
    """Whether the tenants file of a sidecar may have the name."""
    path.write_text(f'named: [{{name: "{name}", saltHash: {HASH}}}]')
    file = TenantsFile(str(path))
    file.follow()
    return not file.problem


@pytest.mark.parametrize("name", [*VALID, *INVALID])
def test_names_are_accepted_everywhere_or_nowhere(name: Any, tmp_path: Any) -> None:
    is_valid = name in VALID
    assert is_name(name) == is_declarable(name) == is_valid
    if isinstance(name, str) and "\n" not in name:
        assert is_usable(name, tmp_path / "tenants.yaml") == is_valid


def test_name_of_the_default_is_reserved(tmp_path: Any) -> None:
    assert is_name(DEFAULT_NAME), "statistics have it"
    assert not is_declarable(DEFAULT_NAME)
    assert not is_usable(DEFAULT_NAME, tmp_path / "tenants.yaml")
