"""From the objects a component wants and those it has to what has to be applied and deleted. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_operator.components.base import Observed, Plan, Problem
from lmcache_operator.components.nodes import abandoned, node_problems
from lmcache_operator.components.pods import pod_problems
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import ref_of
from lmcache_operator.specs.ownership import Path, lost_fields, spell, without

_RENDERING = "rendering"
_HASH_FIELD: Path = ("f:metadata", "f:annotations", f"f:{names.RENDERED_HASH}")


def differences(wanted: list[Object], observed: Observed) -> Plan:
    """Apply what is not as rendered, delete what is not wanted any more."""
    due, lost, problems, must_wait = [], {}, list(_conflicts(observed)), False
    unwanted = dict(observed.children)
    for rendered in wanted:
        ref = ref_of(rendered)
        live = unwanted.pop(ref, None)
        if ref in observed.taken:
            continue
        contested = observed.contested.get(ref, frozenset())
        declared = _uncontested(rendered, contested)
        missing = _lost(declared, live)
        is_other = live is None or _rendered_hash(live) != _rendered_hash(declared)
        # The API server lets nobody change it: it is made anew the next time, and the rest comes after that.
        is_fixed = is_other and declared["kind"] == "ResourceClaimTemplate"
        if () in contested and () in missing:
            problems.append(_contest(f"deleting or taking over {ref}"))
        elif is_other and rendering(declared) in contested:
            problems.append(_contest(f"writing {ref} otherwise, as another operator would"))
        elif must_wait:
            continue
        elif is_fixed and live is not None and _is_deletable(live):
            unwanted[ref] = live
        elif missing or is_other:
            due.append(declared)
            lost[ref] = missing
        # Were the pods' template there before the claims', pods would be replaced that then have no claim, or
        # one of before; and where claims can't be had, none would serve.
        must_wait = must_wait or is_fixed
    return Plan(
        apply=tuple(due),
        lost=lost,
        # Dependents first, and nothing that somebody made his own by taking our label off.
        delete=tuple(ref for ref, live in reversed(unwanted.items()) if _is_deletable(live)),
        abandon=tuple(abandoned(observed)),
        problems=(*problems, *node_problems(observed), *pod_problems(observed)),
    )


def rendering(child: Object) -> Path:
    """Stands for the whole of a child as it is rendered, among the paths that somebody keeps changing."""
    return (_RENDERING, str(_rendered_hash(child)))


def _is_deletable(live: Object) -> bool:
    is_marked = (live["metadata"].get("labels") or {}).get(names.MANAGED_BY_LABEL) == names.FIELD_MANAGER
    return is_marked and "deletionTimestamp" not in live["metadata"]


def _uncontested(rendered: Object, contested: frozenset[Path]) -> Object:
    """The child without the fields that others keep changing; what is left of it is applied and repaired."""
    fields = _fields(contested)
    return names.hashed(without(rendered, fields)) if fields else rendered


def _fields(contested: frozenset[Path]) -> list[Path]:
    return sorted(path for path in contested if path and path[0] != _RENDERING)


def _lost(declared: Object, live: Object | None) -> list[Path]:
    """Fields that are not as we applied them; what we are about to change ourselves is none."""
    if live is None:
        return [()]
    lost = lost_fields(declared, live)
    if any(_HASH_FIELD[: len(path)] == path for path in lost):
        return [()]  # without the hash there is no telling
    return lost if _rendered_hash(live) == _rendered_hash(declared) else []


def _rendered_hash(child: Object) -> str | None:
    return names.annotations_of(child).get(names.RENDERED_HASH)


def _conflicts(observed: Observed) -> Iterator[Problem]:
    for ref in sorted(observed.taken):
        remedy = "delete it or rename this cluster"
        yield Problem("NameTaken", f"{ref} exists and belongs to somebody else: {remedy}")
    for ref, paths in sorted(observed.contested.items()):
        yield from (_contest(f"changing {spell(path)} of {ref}") for path in _fields(paths))


def _contest(what: str) -> Problem:
    return Problem("FieldContested", f"somebody keeps {what}; it is left alone for a while")
