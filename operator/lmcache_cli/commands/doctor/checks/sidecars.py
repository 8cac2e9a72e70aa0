"""Checks of the sidecars: answers, versions, clocks, and who copies from GPUs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.checks.engines import clients, engine_container
from lmcache_cli.commands.doctor.checks.installation import MAX_CLOCK_SECONDS, version_label
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, grouped, ok, unknown, warning
from lmcache_cli.commands.gather import NO_TIME, PodFigures, sidecar_port
from lmcache_operator.components.engine.features.encryption import mounted_secrets
from lmcache_operator.components.engine.gpus import CUDA_IPC
from lmcache_operator.components.injection.profile import SIDECARS
from lmcache_operator.pods.pods import is_ready
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain
from lmcache_store.explain import merge

_FORBIDDEN = "forbidden: "


def answers(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the sidecars answer, are ready, and are in use."""
    if not facts.cluster_pods.is_known:
        yield unknown(facts.cluster_pods)
        return
    # `pods.readiness` reports pods that cannot answer yet.
    pods = [each for each in cluster.pods if sidecar_port(each.pod) is not None]
    pods = [each for each in pods if each.stats or each.pod not in cluster.unready_pods]
    refused = [figures for figures in pods if figures.problem.startswith(_FORBIDDEN)]
    if refused:
        yield unknown(ApiAnswer(missing_right=refused[0].problem.removeprefix(_FORBIDDEN)))
    late = [figures.name for figures in pods if figures.problem == NO_TIME]
    if late:
        yield unknown(ApiAnswer(problem=f"{len(late)} of {len(pods)} sidecars: {NO_TIME}."))
    problems = [
        (figures.name, problem)
        for figures in pods
        if not figures.problem.startswith(_FORBIDDEN) and figures.problem != NO_TIME
        if (problem := _problem(facts, figures))
    ]
    yield from grouped(problems, len(pods))
    if pods and not problems and not refused and not late:
        yield ok(f"Sidecars that are ready and in use: {len(pods)}.")


def _problem(facts: Facts, figures: PodFigures) -> Result | None:
    stats = figures.stats
    if not stats:
        text = f"The sidecar does not answer: {plain(figures.problem)}."
        return warning(text, "Read its log:", "NoAnswer", _log(facts, figures, *SIDECARS))
    if stats.get("is_ready") is not True:
        text = f"The sidecar is not ready: {plain(stats.get('not_ready_reason')) or 'it gives no reason'}."
        return failure(text, "Correct the setting that the reason names.", "SidecarNotReady")
    refusal = plain(stats.get("attach_refusal"))
    is_unused = not merge.count(merge.part(stats, "num_clients").get("attached"))
    if is_ready(figures.pod) and (refusal or is_unused):
        text = f"An engine serves without the cache{refusal and f': {refusal}'}."
        log = _log(facts, figures, dig(engine_container(figures.pod), "name") or "")
        remedy = "Read the lines of LMCache in its log:"
        return failure(text, remedy, "EngineNotAttached", f"{log} | grep -i lmcache")
    return None


def _log(facts: Facts, figures: PodFigures, *containers: str) -> str:
    """Return the command that prints the log of the first of these containers that a pod has."""
    spec = figures.pod["spec"]
    present = [
        each["name"] for each in (*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))
    ]
    name = next((name for name in present if name in containers), "")
    return facts.kubectl(f"logs POD{name and f' -c {name}'}")


def versions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the client in the engine and the sidecar of a pod have one version."""
    problems, known = [], set[str]()
    for figures in cluster.pods:
        sidecar = plain(figures.stats.get("version"))
        in_engine = {plain(each.get("version")) for each in clients(figures.stats)} - {"", sidecar}
        known |= {sidecar} if sidecar else set()
        if sidecar and in_engine:
            text = f"The client in the engine has version {min(in_engine)}, and the sidecar {sidecar}."
            remedy = "Replace the pod, or use one image for sidecar and client."
            problems.append((figures.name, warning(text, remedy)))
    yield from grouped(problems, len(cluster.pods))
    default = _newer_default(facts, cluster, known)
    if default:
        text = f"The operator has version {default}, and sidecars have {', '.join(sorted(known)[:3])}."
        yield warning(text, "Wait until the operator has replaced the pods.")
    elif len(known) > 1:
        text = f"Sidecars have different versions: {', '.join(sorted(known)[:3])}."
        remedy = "Wait until the operator has replaced the pods, or set spec.images.policy to Follow."
        yield warning(text, remedy)
    elif known and not problems:
        yield ok(f"Sidecars and clients have version {min(known)}.")


def _newer_default(facts: Facts, cluster: ClusterFacts, known: set[str]) -> str:
    """Return the operator's version if sidecars should have the same and do not; else empty.

    By default, a cluster keeps the images with which it was created, so that versions may differ.
    """
    parsed, operators = cluster.parsed, facts.operators.items
    if parsed is None or parsed.spec.images.policy != "Follow" or parsed.spec.sidecar.image or not operators:
        return ""
    version = version_label(operators[0])
    return version if known - {version} else ""


def clocks(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the clocks of the pods against the clock of the API server, or else of the user."""
    problems, num_known = [], 0
    reference = "API server" if facts.api_offset_seconds is not None else "user"
    for figures in cluster.pods:
        if not (time := merge.count(figures.stats.get("time"))):
            continue  # it did not answer
        num_known += 1
        offset = time - figures.answered_at - (facts.api_offset_seconds or 0.0)
        if abs(offset) > MAX_CLOCK_SECONDS:
            text = f"The clock of the pod's node differs from the clock of the {reference} by more than 5 s."
            problems.append((figures.name, warning(text, "Synchronize the clocks of the nodes with NTP.")))
    yield from grouped(problems, num_known, ok("The clocks of the pods are right."))


def transfer(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check which process copies KV out of the GPUs."""
    state = dig(cluster.resource, "status", "transfer") or {}
    mode, why = plain(state.get("mode")), plain(state.get("message"))
    if not mode:
        return
    is_wanted = state.get("requested") == CUDA_IPC or state.get("reason") == "SidecarCannotCopy"
    if mode != CUDA_IPC and is_wanted:
        text = f"Engines copy KV out of the GPUs, and not the sidecars: {why}."
        remedy = "Repair what the message names, or set spec.sidecar.transfer to SharedMemory."
        yield warning(text, remedy, "CudaIPCUnavailable")
    else:
        yield ok(f"Mode {mode}: {why}.")


def encryption(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the sidecars encrypt rows with the keys of the spec, also those in injected pods."""
    problems, num_usable = list[tuple[str, Result]](), 0
    secrets = cluster.parsed.spec.tiers.key_secrets if cluster.parsed else {}
    for figures in cluster.pods:
        parts = {tier: part for tier in secrets if (part := merge.part(figures.stats, tier))}
        num_usable += any("encryption_problem" in part for part in parts.values())
        mounted = mounted_secrets(figures.pod, SIDECARS)
        for tier, part in parts.items():
            if problem := _encryption_problem(tier, part, secrets[tier], mounted.get(tier, "")):
                problems.append((figures.name, problem))
    good = ok(f"Sidecars that report no problem with their keys: {num_usable}.")
    yield from grouped(problems, len(cluster.pods), good if num_usable else None)


def _encryption_problem(tier: str, part: Mapping[str, Any], wanted: str, mounted: str) -> Result | None:
    """Return the problem of a sidecar with the keys of a tier.

    ``part`` is the tier's part of /stats. ``wanted`` is the Secret in the spec, and ``mounted`` the pod's.
    """
    if "encryption_problem" not in part:  # a sidecar that got no keys, or of an earlier version
        text = f"The sidecar writes rows of the {tier} tier without encryption."
        remedy = (
            "Replace the pod. If that does not help, give its sidecar the image of the operator's version."
        )
        return failure(text, remedy, "EncryptionKeysInvalid")
    if why := plain(part["encryption_problem"]):
        text = f"The sidecar has a problem with the keys of the {tier} tier: {why}."
        return failure(text, f"Correct the keys in Secret {mounted or wanted}.", "EncryptionKeysInvalid")
    if mounted and mounted != wanted:
        text = f"The sidecar encrypts the rows of the {tier} tier with Secret {mounted}, not {wanted}."
        return warning(text, "Replace the pod, or wait until the operator has replaced it.")
    return None


def pinned_memory(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that CUDA has pinned the memory tiers that copies use."""
    problems, num_pinned = [], 0
    for figures in cluster.pods:
        state = merge.part(figures.stats, "transfer")
        num_pinned += any(merge.totals([state], "pinned_bytes").values())
        if why := plain(state.get("pin_problem")):
            text = f"CUDA has not pinned all of the memory tier, so copies are slow: {why}."
            remedy = "Repair what the message names, and delete the pod."
            problems.append((figures.name, warning(text, remedy, "MemoryNotPinned")))
    good = ok(f"Pods with a pinned memory tier: {num_pinned}.")
    yield from grouped(problems, len(cluster.pods), good if num_pinned else None)
