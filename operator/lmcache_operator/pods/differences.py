"""The objects to apply and to delete, from a component's rendered and existing objects. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lmcache_operator.contract.base import Observed, Plan
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.nodes import abandoned, node_problems
from lmcache_operator.pods.pods import first_crash, pod_problems
from lmcache_operator.specs import Object, names
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.ownership import Path, lost_fields, spell, without

_RENDERING = "rendering"
_HASH_FIELD: Path = ("f:metadata", "f:annotations", f"f:{names.RENDERED_HASH}")


def differences(wanted: list[Object], observed: Observed) -> Plan:
    """Plan to apply every changed or missing object, and to delete every object that is not in ``wanted``."""
    taken = [ref for ref in map(ref_of, wanted) if ref in observed.taken]
    due, lost, problems, must_wait = [], {}, list(_conflicts(observed, taken)), False
    unwanted = dict(observed.children)
    for rendered in wanted:
        ref = ref_of(rendered)
        live = unwanted.pop(ref, None)
        if ref in taken:
            continue
        contested = observed.contested.get(ref, frozenset())
        declared = _uncontested(rendered, contested)
        missing = _lost(declared, live)
        is_other = live is None or _rendered_hash(live) != _rendered_hash(declared)
        # A ResourceClaimTemplate is immutable. This run deletes it, and the next run creates it again.
        is_fixed = is_other and declared["kind"] == "ResourceClaimTemplate"
        if () in contested and () in missing:
            problems.append(_contest(f"deleting or taking over {ref}"))
        elif is_other and rendering(declared) in contested:
            problems.append(_contest(f"writing a different {ref}, as a second operator would"))
        elif must_wait:
            continue
        elif is_fixed and live is not None and _is_deletable(live):
            unwanted[ref] = live
        elif missing or is_other:
            due.append(declared)
            lost[ref] = missing
        # The claims' template must be applied before the pods' template. Otherwise replaced pods would get no
        # claim or an outdated one, and if no claim can be allocated, no pod would serve.
        must_wait = must_wait or is_fixed
    # Dependents go first. A user who removes the operator's label from an object keeps the object.
    delete = tuple(ref for ref, live in reversed(unwanted.items()) if _is_deletable(live))
    plan = replace(unchanged(observed, *problems), apply=tuple(due), lost=lost, delete=delete)
    return replace(plan, taken=tuple(ref for ref in taken if not is_unused_by_pods(ref, observed.name)))


def halted(plan: Plan) -> Plan:
    """The plan without steps that write, delete or replace anything.

    Otherwise pods would get a ServiceAccount, settings or open ports from an object of another owner, or run
    without their NetworkPolicy.
    """
    return replace(plan, make=(), apply=(), lost={}, delete=(), evict=(), resize=())


def unchanged(observed: Observed, *problems: Problem) -> Plan:
    """A plan that changes no child: it reports problems, and deletes terminating pods on lost nodes."""
    problems = (*problems, *node_problems(observed), *pod_problems(observed))
    return Plan(abandon=tuple(abandoned(observed)), problems=problems, crash=first_crash(observed))


def rendering(child: Object) -> Path:
    """A pseudo path that stands for a whole rendered child among contested paths."""
    return (_RENDERING, str(_rendered_hash(child)))


def _is_deletable(live: Object) -> bool:
    is_marked = (live["metadata"].get("labels") or {}).get(names.MANAGED_BY_LABEL) == names.FIELD_MANAGER
    return is_marked and "deletionTimestamp" not in live["metadata"]


def _uncontested(rendered: Object, contested: frozenset[Path]) -> Object:
    """The child without its contested fields. The operator still applies and repairs the other fields."""
    fields = _fields(contested)
    return names.hashed(without(rendered, fields)) if fields else rendered


def _fields(contested: frozenset[Path]) -> list[Path]:
    return sorted(path for path in contested if path and path[0] != _RENDERING)


def _lost(declared: Object, live: Object | None) -> list[Path]:
    """Fields that another client changed; none while the operator is about to change the child itself."""
    if live is None:
        return [()]
    lost = lost_fields(declared, live)
    if any(_HASH_FIELD[: len(path)] == path for path in lost):
        return [()]  # without the hash, the operator can't tell which fields changed
    return lost if _rendered_hash(live) == _rendered_hash(declared) else []


def _rendered_hash(child: Object) -> str | None:
    return names.annotations_of(child).get(names.RENDERED_HASH)


def is_unused_by_pods(ref: Ref, cluster_name: str) -> bool:
    """Whether pods neither use an object nor depend on it for their security.

    Of a Certificate they use only the Secret, whose name contains the uid of the cluster.
    """
    return ref.kind in ("Certificate", "PodDisruptionBudget") or ref == Ref("Service", cluster_name)


def _conflicts(observed: Observed, taken: list[Ref]) -> Iterator[Problem]:
    for ref in sorted(taken):
        remedy = "delete it or rename this cluster"
        yield Problem("NameTaken", f"{ref} exists and does not belong to this LMCacheCluster: {remedy}")
    for ref, paths in sorted(observed.contested.items()):
        yield from (_contest(f"changing {spell(path)} of {ref}") for path in _fields(paths))


def _contest(what: str) -> Problem:
    return Problem("FieldContested", f"another client keeps {what}; the operator pauses this repair")
