"""From what is and what should be to what has to be done. Pure: no client, no clock, no state."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lmcache_operator.api.parse import parse
from lmcache_operator.errors import InvalidSpecError
from lmcache_operator.reconcile.observed import Observed, annotations_of, is_ready, spec_hash_of
from lmcache_operator.reconcile.ownership import Path, lost_fields, spell, without
from lmcache_operator.reconcile.problems import Problem, pod_problems
from lmcache_operator.specs import Images, Object
from lmcache_operator.specs.children import children, digest
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.names import DEFAULT_IMAGES, RENDERED_HASH, SIDECAR

_HASH_FIELD: Path = ("f:metadata", "f:annotations", f"f:{RENDERED_HASH}")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is due for one cluster. At rest everything in it is empty."""

    apply: tuple[Object, ...] = ()
    """Children to write, prerequisites first."""
    lost: Mapping[Ref, list[Path]] = field(default_factory=dict)
    """Fields of these that are not as we applied them: () for a child that is not there."""
    evict: str | None = None
    """Pod to replace now."""
    problems: tuple[Problem, ...] = ()
    num_outdated: int = 0
    """Pods that still are what the user declared before."""
    num_former_size: int = 0
    """Other pods whose memory tier has a size that was declared before."""


def plan(observed: Observed, images: Images, operator_namespace: str = "") -> Plan:
    """Compare the cluster with its spec. With an invalid spec everything stays as it is.

    ``images`` are the operator's own, for a cluster that names none and has none yet.
    """
    try:
        default_images = _default_images(observed.stateful_set, images)
        wanted = children(parse(observed.resource), default_images, operator_namespace)
    except InvalidSpecError as error:
        return Plan(problems=(Problem("InvalidSpec", str(error)),))
    due, lost, problems = [], {}, list(_problems(observed))
    for rendered in wanted:
        ref = ref_of(rendered)
        if ref in observed.taken:
            continue
        contested = observed.contested.get(ref, frozenset())
        declared, live = _leaving_alone(rendered, contested), observed.children.get(ref)
        missing = _lost(declared, live)
        if () in contested and () in missing:
            problems.append(_contest(f"deleting or taking over {ref}"))
        elif live is None or missing or _rendered_hash(live) != _rendered_hash(declared):
            due.append(declared)
            lost[ref] = missing
    stateful_set = next(rendered for rendered in wanted if rendered["kind"] == "StatefulSet")
    template = stateful_set["spec"]["template"]
    outdated = [pod for pod in observed.pods if spec_hash_of(pod) != spec_hash_of(template)]
    size = _memory_size(template)
    return Plan(
        apply=tuple(due),
        lost=lost,
        # Not before the template is written: the old pod would be made again.
        evict=None if ref_of(stateful_set) in lost else _next_eviction(observed, outdated, template),
        problems=(*problems, *pod_problems(observed)),
        num_outdated=len(outdated),
        num_former_size=sum(pod not in outdated and _memory_size(pod) != size for pod in observed.pods),
    )


def _leaving_alone(rendered: Object, contested: frozenset[Path]) -> Object:
    """The child without the fields that others keep changing; what is left of it is applied and healed."""
    if not contested - {()}:
        return rendered
    kept = without(rendered, contested)
    annotations = {key: value for key, value in annotations_of(kept).items() if key != RENDERED_HASH}
    kept["metadata"] = kept["metadata"] | {"annotations": annotations}
    annotations[RENDERED_HASH] = digest(kept)
    return kept


def _lost(declared: Object, live: Object | None) -> list[Path]:
    """Fields that are not as we applied them; what we are about to change ourselves is none."""
    if live is None:
        return [()]
    lost = lost_fields(declared, live)
    if any(_HASH_FIELD[: len(path)] == path for path in lost):
        return [()]  # without the hash there is no telling
    return lost if _rendered_hash(live) == _rendered_hash(declared) else []


def _rendered_hash(child: Object) -> str | None:
    return annotations_of(child).get(RENDERED_HASH)


def _memory_size(pod_or_template: Object) -> list[str]:
    """The size of the memory tier, as the sidecar is told it."""
    return [
        argument
        for container in pod_or_template["spec"].get("initContainers") or ()
        for argument in container.get("args") or ()
        if container["name"] == SIDECAR and argument.startswith("--memory-size")
    ]


def _default_images(stateful_set: Object | None, images: Images) -> Images:
    """The images that stand in where the user names none.

    They are recorded when the StatefulSet is made, so that an upgrade of the operator changes no image of a
    cluster that exists.
    """
    if stateful_set is None:
        return images
    try:
        recorded = json.loads(annotations_of(stateful_set).get(DEFAULT_IMAGES, "{}"))
        return images | {name: recorded[name] for name in images if isinstance(recorded.get(name), str)}
    except (ValueError, AttributeError):
        return images  # edited by hand: written anew


def _problems(observed: Observed) -> Iterator[Problem]:
    for ref in sorted(observed.taken):
        mend = "delete it or rename this cluster"
        yield Problem("NameTaken", f"{ref} exists and belongs to somebody else: {mend}")
    for ref, paths in sorted(observed.contested.items()):
        yield from (_contest(f"changing {spell(path)} of {ref}") for path in sorted(paths) if path)


def _contest(what: str) -> Problem:
    return Problem("FieldContested", f"somebody keeps {what}; it is left alone for a while")


def _next_eviction(observed: Observed, outdated: list[Object], template: Object) -> str | None:
    """The one pod to replace now, if any.

    One at a time: nothing is evicted while a pod is missing, ending, or new and not ready yet. So a
    declaration that can't run stops after one pod, and the others go on serving. Outdated pods that serve
    nothing go first.
    """
    stateful_set = observed.stateful_set
    if not outdated or stateful_set is None:
        return None
    # Until the new template is there, and its controller has seen it, the old pod would be made again.
    seen = stateful_set.get("status", {}).get("observedGeneration", 0)
    is_there = spec_hash_of(stateful_set["spec"]["template"]) == spec_hash_of(template)
    is_unseen = not is_there or seen < stateful_set["metadata"].get("generation", 0)
    is_missing = len(observed.pods) < stateful_set["spec"]["replicas"]
    is_unsettled = any(
        "deletionTimestamp" in pod["metadata"] or (not is_ready(pod) and pod not in outdated)
        for pod in observed.pods
    )
    if is_unseen or is_missing or is_unsettled:
        return None
    return min((is_ready(pod), str(pod["metadata"]["name"])) for pod in outdated)[1]
