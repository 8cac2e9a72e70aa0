"""Tenants by name, as sidecars count them: figures, advice, and lines for a terminal. Pure.

Reports come from users' pods and are not trusted; see ``merge``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lmcache_store.common.text import gigabytes, table
from lmcache_store.explain import merge, tables
from lmcache_store.explain.findings import percent
from lmcache_store.tenant_names import DEFAULT_NAME, is_name

PART = "tenants"
"""Part of ``/stats`` with figures by the name of the tenant."""
ABOUT = f"name of a tenant; {DEFAULT_NAME}: all requests whose salt has no name, or that have no salt"
"""Help text of ``--tenant``."""
WHOSE = "the tenant's"
"""See ``findings``."""
_MAX_NAMES = 512
_FULL = 0.95
"""Share of its upper bound from which a tenant counts as being at the bound."""


class TenantTotals(NamedTuple):
    """Figures of one tenant, of all sidecars together."""

    name: str
    prompt_tokens: int
    hit_tokens: int
    rows: int
    """Rows in memory."""
    bytes: int
    """Bytes of these rows."""
    guaranteed_bytes: int
    """Guaranteed share of the memory; 0: none."""
    bound_bytes: int
    """Upper bound in memory; for `DEFAULT_NAME`, of each salt alone."""
    evictions: int
    refused: int
    """Stores in memory that were refused."""
    disk_bytes: int
    disk_bound_bytes: int
    """Upper bound on disk; for `DEFAULT_NAME`, of each salt alone. 0: none."""
    disk_refused: int
    """Rows that were not written to disk because of the bound."""
    usable_bytes: int
    """Memory of all tenants."""

    def advice(self) -> str:
        """Return what to do about rows of this tenant that were evicted."""
        if self.name == DEFAULT_NAME:
            return (
                "Increase the memory tier, or memoryPercent of default if a salt is at this bound. Or reduce"
                " guaranteed shares."
            )
        if self.bound_bytes < self.usable_bytes and self.bytes >= _FULL * self.bound_bytes:
            return "The tenant is at its upper bound. Increase its memoryPercent, or the memory tier."
        if not self.guaranteed_bytes:
            return (
                "The tenant has no guaranteed share, so that stores of other tenants evict its rows. Set its"
                " minMemoryPercent, or increase the memory tier."
            )
        return "Increase the tenant's minMemoryPercent, or the memory tier."


def names(reports: Sequence[Any]) -> list[str]:
    """Return the names of all tenants, `DEFAULT_NAME` first; none if no sidecar is ready."""
    present = {name for report in reports for name in merge.part(report, PART, "bytes") if is_name(name)}
    return sorted(present, key=lambda name: (name != DEFAULT_NAME, name))[:_MAX_NAMES]


def tenant(reports: Sequence[Any], name: str) -> TenantTotals:
    """Return the figures of one tenant."""
    counted = {
        field: int(merge.total(reports, PART, field, name))
        for field in TenantTotals._fields
        if field not in ("name", "usable_bytes")
    }
    return TenantTotals(name, **counted, usable_bytes=int(merge.total(reports, "memory", "usable_bytes")))


def causes(reports: Sequence[Any], name: str) -> dict[str, Any]:
    """Return the causes of one tenant's prompt tokens; see ``merge.causes``."""
    return merge.causes(reports, PART, "causes", name)


def by_name(reports: Sequence[Any]) -> list[TenantTotals]:
    """Return the figures of all tenants, those with the most prompt tokens first."""
    return sorted((tenant(reports, name) for name in names(reports)), key=lambda each: -each.prompt_tokens)


def unknown(name: str, known: Sequence[str]) -> str:
    """Return a sentence about a name that is not among the known names."""
    if not known:
        return "no sidecar is ready, so none counts causes by tenant"
    listed = ", ".join(known)
    return (
        f"there is no tenant {name!r}: the tenants are {listed}. Requests with a salt that has no entry in "
        f"spec.tenants or --tenants-file, and requests without a salt, count as {DEFAULT_NAME}"
    )


def overview(reports: Sequence[Any]) -> Iterator[str]:
    """Yield a table of all tenants; nothing if no tenant has a name."""
    listed = by_name(reports)
    if len(listed) < 2:
        return
    titles = ("TENANT", "PROMPT TOKENS", "HIT", "MEMORY", "GUARANTEED", "BOUND", "EVICTED", "REFUSED")
    rows: list[tuple[str, ...]] = [titles]
    for each in listed:
        hit = percent(each.hit_tokens, each.prompt_tokens) if each.prompt_tokens else "-"
        memory = [gigabytes(number) for number in (each.bytes, each.guaranteed_bytes, each.bound_bytes)]
        lost = f"{each.evictions:,}", f"{each.refused + each.disk_refused:,}"
        rows.append((each.name, f"{each.prompt_tokens:,}", hit, *memory, *lost))
    yield ""
    yield from table(rows, right=range(1, len(titles)))
    yield "With --tenant NAME, this command shows the causes of one tenant."


def lines(reports: Sequence[Any], name: str, usd_per_token: float = 0.0) -> Iterator[str]:
    """Yield the lines that explain the prompts of one tenant, and what it holds."""
    each, counted = tenant(reports, name), causes(reports, name)
    if counted["prompt_tokens"]:
        yield f"Tenant {name}."
        yield from tables.overview(counted, usd_per_token, each.advice(), WHOSE)
    else:
        yield f"No prompt of tenant {name} was counted yet."
        if name != DEFAULT_NAME:
            yield f"Requests with another salt, or without a salt, count as {DEFAULT_NAME}."
    yield ""
    yield from _uses(each)


def _uses(each: TenantTotals) -> Iterator[str]:
    """Yield what the tenant holds in memory and on disk, and what was refused."""
    scope = " for each salt" if each.name == DEFAULT_NAME else ""
    share = f", guaranteed {gigabytes(each.guaranteed_bytes)}" if each.guaranteed_bytes else ""
    bound = f", at most {gigabytes(each.bound_bytes)}{scope}"
    yield f"Memory: {gigabytes(each.bytes)} in {each.rows:,} rows{share}{bound}."
    if each.disk_bound_bytes:
        yield f"Disk: {gigabytes(each.disk_bytes)}, at most {gigabytes(each.disk_bound_bytes)}{scope}."
    yield (
        f"Since the start, memory evicted {each.evictions:,} rows and refused {each.refused:,} stores."
        + (f" The bound on disk refused {each.disk_refused:,} rows." if each.disk_bound_bytes else "")
    )


def document(each: TenantTotals) -> Mapping[str, Any]:
    """Return the figures of a tenant as plain data for programs, in camel case."""
    return {_camel(field): value for field, value in each._asdict().items() if field != "usable_bytes"}


def _camel(field: str) -> str:
    first, *rest = field.split("_")
    return first + "".join(map(str.capitalize, rest))
