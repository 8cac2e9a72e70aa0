"""From what is and what should be to what has to be done. Pure: no client, no clock, no state."""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..api.parse import Cluster, InvalidSpec, parse
from ..settings import RenderSettings
from ..specs import Images, Object
from ..specs.children import children
from ..specs.kinds import Ref, ref_of
from ..specs.merge import first_difference
from ..specs.names import DEFAULT_IMAGES, ENGINE, SIDECAR
from ..specs.transfer import Transfer, resolve_transfer
from .observed import Observed, is_ready, spec_hash_of


@dataclass(frozen=True)
class Problem:
    """Something that the user, and nobody else, can mend."""

    reason: str
    message: str
    is_blocking: bool = True
    """Whether the cluster is not what was asked for; else it works, but less well."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is due for one cluster. At rest everything in it is empty."""

    apply: tuple[Object, ...] = ()
    """Children to write, prerequisites first."""
    delete: tuple[Ref, ...] = ()
    """Children no longer wanted."""
    evict: str | None = None
    """Pod to replace now."""
    problems: tuple[Problem, ...] = ()
    transfer: Transfer | None = None
    """None when the spec is invalid."""
    num_outdated: int = 0
    """Pods that still are what the user declared before."""


def plan(observed: Observed, settings: RenderSettings) -> Plan:
    """Compare the cluster with its spec. With an invalid spec everything stays as it is."""
    try:
        cluster = parse(observed.resource)
        wanted = children(cluster, default_images(observed, settings), settings)
    except InvalidSpec as error:
        return Plan(problems=(Problem("InvalidSpec", str(error)),))
    transfer = resolve_transfer(cluster, settings)
    unavailable = {*observed.taken, *observed.contested}
    apply = tuple(
        rendered
        for rendered in wanted
        if (ref := ref_of(rendered)) not in unavailable
        and first_difference(rendered, observed.children.get(ref)) is not None
    )
    wanted_refs = {ref_of(rendered) for rendered in wanted}
    template = next(rendered for rendered in wanted if rendered["kind"] == "StatefulSet")["spec"]["template"]
    outdated = [pod for pod in observed.pods if spec_hash_of(pod) != spec_hash_of(template)]
    is_written = not any(rendered["kind"] == "StatefulSet" for rendered in apply)
    return Plan(
        apply=apply,
        delete=tuple(sorted(set(observed.children) - wanted_refs)),
        evict=_next_eviction(observed, outdated, template) if is_written else None,
        problems=tuple(_problems(observed, transfer)),
        transfer=transfer,
        num_outdated=len(outdated),
    )


def default_images(observed: Observed, settings: RenderSettings) -> Images:
    """The images that stand in where the user names none.

    They are recorded when the StatefulSet is made, so that an upgrade of the operator changes no image of a
    cluster that exists.
    """
    images = {ENGINE: settings.engine_image, SIDECAR: settings.sidecar_image}
    if observed.stateful_set is not None:
        annotations = observed.stateful_set["metadata"].get("annotations") or {}
        try:
            recorded = json.loads(annotations.get(DEFAULT_IMAGES, "{}"))
            images |= {name: recorded[name] for name in images if isinstance(recorded.get(name), str)}
        except (ValueError, AttributeError):
            pass  # edited by hand: written anew
    return images


def referenced_secrets(cluster: Cluster) -> tuple[str, ...]:
    """Names of the Secrets that pods of the cluster mount."""
    refs = (cluster.spec.model.token_secret_ref, cluster.spec.tiers.remote_auth)
    return tuple(sorted({ref.name for ref in refs if ref}))


def _problems(observed: Observed, transfer: Transfer) -> list[Problem]:
    problems = [
        Problem("MissingSecret", f'Secret "{name}" does not exist in this namespace')
        for name in observed.missing_secrets
    ]
    problems += [
        Problem("NameTaken", f"{ref} exists and belongs to somebody else: delete it or rename this cluster")
        for ref in sorted(observed.taken)
    ]
    problems += [
        Problem(
            "FieldContested", f"somebody keeps changing {where} of {ref}; it is left alone for ten minutes"
        )
        for ref, where in sorted(observed.contested.items())
    ]
    if transfer.problem:
        problems.append(Problem("TransferNotPossible", transfer.problem, is_blocking=False))
    return problems


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
    if not is_there or seen < stateful_set["metadata"].get("generation", 0):
        return None
    if len(observed.pods) < stateful_set["spec"]["replicas"]:
        return None
    if any("deletionTimestamp" in pod["metadata"] for pod in observed.pods):
        return None
    if any(not is_ready(pod) and pod not in outdated for pod in observed.pods):
        return None
    name: str = min(outdated, key=lambda pod: (is_ready(pod), pod["metadata"]["name"]))["metadata"]["name"]
    return name
