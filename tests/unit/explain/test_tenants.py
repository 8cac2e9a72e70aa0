"""Figures, advice and lines about tenants, from the reports of sidecars."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache_store.explain import tenants
from tests.unit.explain.test_merge import ANY

GB = 10**9


def report(**figures: dict[str, Any]) -> dict[str, Any]:
    """The report of one sidecar with 10 GB of memory: search hit half of its prompts, default none."""
    part: dict[str, Any] = {
        "bytes": {"default": GB, "search": 2 * GB},
        "rows": {"default": 10, "search": 20},
        "guaranteed_bytes": {"default": 0, "search": 4 * GB},
        "bound_bytes": {"default": GB, "search": 10 * GB},
        "evictions": {"default": 7, "search": 5},
        "refused": {"default": 3, "search": 0},
        "prompt_tokens": {"default": 50, "search": 1000},
        "hit_tokens": {"default": 0, "search": 500},
        "causes": {
            "default": {"prompt_tokens": 50, "cause_tokens": {"new": 50}, "diverged_tokens": {}},
            "search": {
                "prompt_tokens": 1000,
                "cause_tokens": {"memory": 500, "evicted": 500},
                "diverged_tokens": {},
            },
        },
    }
    return {"memory": {"usable_bytes": 10 * GB}, "tenants": part | figures}


def text(*reports: dict[str, Any], name: str = "search") -> str:
    return "\n".join(tenants.lines(reports, name))


def test_table_has_the_tenant_with_most_tokens_first() -> None:
    assert not list(tenants.overview([report(bytes={"default": 1})])), "no tenant has a name"
    title, search, default = list(tenants.overview([report(disk_refused={"default": 2})]))[1:4]
    assert " ".join(title.split()) == "TENANT PROMPT TOKENS HIT MEMORY GUARANTEED BOUND EVICTED REFUSED"
    assert search.split() == ["search", "1,000", "50", "%", "2.00G", "4.00G", "10.00G", "5", "0"]
    assert default.split() == ["default", "50", "0", "%", "1.00G", "0", "1.00G", "7", "5"]


def test_lines_of_a_tenant_have_its_causes_and_its_budget() -> None:
    shown = text(report(disk_bytes={"search": GB}, disk_bound_bytes={"search": 2 * GB}))
    assert "50 % of the tenant's prompt tokens were stored before" in " ".join(shown.split())
    assert shown.startswith("Tenant search.\n1,000 tokens of prompts: 50 % loaded, 50 % computed.\n")
    assert "Memory: 2.00G in 20 rows, guaranteed 4.00G, at most 10.00G.\nDisk: 1.00G, at most 2.00G." in shown
    assert "evicted 5 rows and refused 0 stores. The bound on disk refused 0 rows." in shown
    assert "at most 1.00G for each salt." in text(report(), name="default")


@pytest.mark.parametrize(
    ("figures", "advice"),
    [
        ({}, "Increase the tenant's minMemoryPercent, or the memory tier."),
        ({"guaranteed_bytes": {}}, "The tenant has no guaranteed share"),
        ({"bound_bytes": {"search": 2 * GB}}, "The tenant is at its upper bound"),
    ],
)
def test_advice_about_evicted_rows_names_the_budget(figures: dict[str, Any], advice: str) -> None:
    assert advice in " ".join(text(report(**figures)).split())


def test_tenant_without_prompts_may_have_another_salt() -> None:
    shown = text(report(causes={}))
    assert shown.startswith("No prompt of tenant search was counted yet.\nRequests with another salt")
    assert "another salt" not in text(report(causes={}), name="default")


def test_unknown_name_is_answered_with_the_known_names() -> None:
    known = tenants.names([report(), report(bytes={"batch": 1})])
    assert known == ["default", "batch", "search"]
    assert "no tenant 'x': the tenants are default, batch, search." in tenants.unknown("x", known)


def test_without_a_ready_sidecar_no_tenant_is_known() -> None:
    assert tenants.names([{}]) == []
    assert "no sidecar is ready" in tenants.unknown("search", [])


@given(st.lists(st.dictionaries(st.sampled_from(["tenants", "memory", "x"]), ANY, max_size=3), max_size=3))
def test_any_report_can_be_shown(reports: list[Any]) -> None:
    assert all(name.isascii() for name in tenants.names(reports))
    assert list(tenants.lines(reports, "search"))
    list(tenants.overview(reports))


@pytest.mark.parametrize("name", ["\x1b[2J", "A", "", "a" * 64, "-a"])
def test_names_that_no_file_can_have_are_not_shown(name: str) -> None:
    assert tenants.names([report(bytes={name: 5})]) == []
