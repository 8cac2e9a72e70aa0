"""From what is and what should be to what has to be done. Pure: no client, no clock, no state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..api.parse import InvalidSpec, parse
from ..specs import Images, Object
from ..specs.children import children
from ..specs.kinds import ref_of
from ..specs.merge import first_difference
from ..specs.names import DEFAULT_IMAGES
from .observed import Observed, annotations_of, is_ready, spec_hash_of


class Problem(NamedTuple):
    """Something that the user, and nobody else, can mend."""

    reason: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is due for one cluster. At rest everything in it is empty."""

    apply: tuple[Object, ...] = ()
    """Children to write, prerequisites first."""
    evict: str | None = None
    """Pod to replace now."""
    problems: tuple[Problem, ...] = ()
    num_outdated: int = 0
    """Pods that still are what the user declared before."""


def plan(observed: Observed, images: Images) -> Plan:
    """Compare the cluster with its spec. With an invalid spec everything stays as it is.

    `images` are the operator's own, for a cluster that names none and has none yet.
    """
    try:
        wanted = children(parse(observed.resource), _default_images(observed.stateful_set, images))
    except InvalidSpec as error:
        return Plan(problems=(Problem("InvalidSpec", str(error)),))
    unavailable = {*observed.taken, *observed.contested}
    apply = tuple(
        rendered
        for rendered in wanted
        if (ref := ref_of(rendered)) not in unavailable
        and first_difference(rendered, observed.children.get(ref)) is not None
    )
    stateful_set = next(rendered for rendered in wanted if rendered["kind"] == "StatefulSet")
    template = stateful_set["spec"]["template"]
    outdated = [pod for pod in observed.pods if spec_hash_of(pod) != spec_hash_of(template)]
    return Plan(
        apply=apply,
        # Not before the template is written: the old pod would be made again.
        evict=None if stateful_set in apply else _next_eviction(observed, outdated, template),
        problems=tuple(_problems(observed)),
        num_outdated=len(outdated),
    )


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


def referenced_secrets(resource: Object) -> tuple[str, ...]:
    """Names of the Secrets that pods of the cluster mount; none with an invalid spec, which makes no pods."""
    try:
        spec = parse(resource).spec
    except InvalidSpec:
        return ()
    refs = (spec.model.token_secret_ref, spec.tiers.remote_auth)
    return tuple(sorted({ref.name for ref in refs if ref}))


def _problems(observed: Observed) -> Iterator[Problem]:
    for name in observed.missing_secrets:
        yield Problem("MissingSecret", f'Secret "{name}" does not exist in this namespace')
    for ref in sorted(observed.taken):
        mend = "delete it or rename this cluster"
        yield Problem("NameTaken", f"{ref} exists and belongs to somebody else: {mend}")
    for ref, where in sorted(observed.contested.items()):
        pause = "it is left alone for ten minutes"
        yield Problem("FieldContested", f"somebody keeps changing {where} of {ref}; {pause}")


def _next_eviction(observed: Observed, outdated: list[Object], template: Object) -> str | None:
    """The one pod to replace now, if any.

    One at a time: nothing is evicted while a pod is missing, ending, or new and not ready yet. So a
    declaration that can't run stops after one pod, and the others go on serving. Outdated pods that serve
    nothing go first.
    """
    stateful_set = observed.stateful_set
    # A new pod that can't mount a Secret would be worse than the old one.
    if not outdated or stateful_set is None or observed.missing_secrets:
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
