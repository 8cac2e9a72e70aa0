"""Conditions, problems and Events of a cluster, and all reasons that conditions may have.

Programs match on the reasons, and people look them up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from lmcache_operator.specs import Object

Expected = Literal[
    "AsDeclared", "Attached", "Available", "Complete", "Counting", "Encrypted", "EnginesReady", "NoEngine",
    "NotReported", "Pinned", "Reachable", "Ready", "Recommending", "Replacing", "Required", "ResizePending",
    "Resizing", "RouterReady", "ScaledToZero", "Scaling", "Serving", "ShardsReady", "Shared", "Sizing",
    "Starting", "TenantsInUse", "TenantsPending",
]  # fmt: skip
"""Reasons of conditions that match the spec, or progress towards it."""
Trouble = Literal[
    "ApiError", "AutoscalingFrozen", "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError",
    "CudaIPCUnavailable", "DiskTierOff", "EncryptionKeysInvalid", "EngineNotAttached", "FailedBinding",
    "FailedCreate", "FailedMount", "FieldContested", "ImagePullBackOff", "InternalError", "InvalidSpec",
    "KVPrivate", "MemoryNotPinned", "NameTaken", "NoAnswer", "NoEngineReady", "NodeLost", "OOMKilled",
    "PagesOpen", "PeersNotShared", "PodFailed", "PodsWithoutCache", "ProgressDeadlineExceeded", "Refused",
    "RemoteTierNotShared", "RemoteTierUnreachable", "ResizeInfeasible", "RouterNotReady", "ShardsMissing",
    "SidecarNotReady", "TenantsInvalid", "Unschedulable",
]  # fmt: skip
"""Reasons of problems. `runbook` leads to the explanation of each."""
TROUBLES = frozenset(get_args(Trouble))
_OF_PODS = frozenset((
    "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "FailedBinding", "FailedCreate",
    "FailedMount", "ImagePullBackOff", "NodeLost", "OOMKilled", "PodFailed", "ProgressDeadlineExceeded",
    "Unschedulable",
))  # fmt: skip
"""Reasons for which a pod does not run. They share one page."""
Reason = Expected | Trouble
_ATTACHED = "See the condition SidecarAttached"


def runbook(reason: str) -> str:
    """Return the page in docs/runbooks about a reason or an alert, with the anchor of its section."""
    return f"PodDoesNotStart.md#{reason.lower()}" if reason in _OF_PODS else f"{reason}.md"


class Problem(NamedTuple):
    """An obstacle to the declared state that only the user can remove."""

    reason: Trouble
    message: str


class Condition(NamedTuple):
    """A condition of the status, without its type and times."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str
    generation: int | None = None
    """Generation of the spec that it was derived from; None: the present generation."""


def problem_message(problem: str, pods: Sequence[tuple[str, str]], total: int, remedy: str = "") -> str:
    """The message about a problem of some of ``total`` pods. ``pods``: their names, each with its reason.

    ``1 of 3 sidecars are not ready. First: pod demo-engine-0: no socket. See its log.``
    """
    pod, why = pods[0]
    first = f"First: pod {pod}: {why}" if why else f"First: pod {pod}"
    sentences = (f"{len(pods)} of {total} {problem}", first, remedy)
    return " ".join(f"{sentence.removesuffix('.')}." for sentence in sentences if sentence)


def failure_of(
    reason: Reason, problem: str, pods: Sequence[tuple[str, str]], total: int, remedy: str = ""
) -> Condition | None:
    """The condition about a problem of some pods; None: no pod has it."""
    return Condition("False", reason, problem_message(problem, pods, total, remedy)) if pods else None


def silence_of(
    reason: Reason, problem: str, pods: Sequence[str], total: int, remedy: str = _ATTACHED
) -> Condition | None:
    """The condition about a report that some pods do not give; None: all give it."""
    failure = failure_of(reason, problem, [(pod, "") for pod in pods], total, remedy)
    return failure and failure._replace(status="Unknown")


class Event(NamedTuple):
    """A Kubernetes Event about a cluster."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def former_conditions(resource: Object, *kinds: str) -> dict[str, Condition]:
    """Conditions of these types in the present status of a cluster; without ``kinds``: all of them."""
    before = (resource.get("status") or {}).get("conditions") or ()
    keys = ("status", "reason", "message", "observedGeneration")
    known = {c["type"]: Condition(*(c[key] for key in keys)) for c in before if c.keys() >= set(keys)}
    return {kind: known[kind] for kind in kinds or known if kind in known}
