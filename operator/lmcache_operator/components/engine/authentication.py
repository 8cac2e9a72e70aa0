"""Tokens for the sidecar's pages: the Secret, the sidecar's mount and options, and the condition. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.types import TOKEN
from lmcache_operator.contract.base import Observed, Sidecar
from lmcache_operator.contract.conditions import Condition
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig

TOKENS_REQUIRED: Final = "TokensRequired"
"""Type of the condition."""

VOLUME = "pages"
_TOKENS_DIR = "LMCACHE_HTTP_TOKENS_DIR"
_OPEN = (
    "it does not ask for tokens. If its image is of an earlier version, set spec.images.policy to Follow, or "
    "spec.sidecar.image to a later image"
)


def options(authentication: str) -> dict[str, str]:
    """Variables of the sidecar; none without authentication.

    These are variables and not keys of the shared file, because only pods that mount the tokens may get them.
    """
    return {_TOKENS_DIR: paths.PAGES_DIR} if authentication == TOKEN else {}


def token_volume(cluster: Cluster) -> Object:
    """The volume source of the tokens. A missing Secret stops no pod: its sidecar accepts no token."""
    return {"secret": {"optional": True, "secretName": names.pages_name(cluster.name)}}


def secrets(cluster: Cluster) -> tuple[Object, ...]:
    """The Secret with the tokens; none without authentication. An existing Secret is used as it is.

    The operator cannot read Secrets, so it tries to create this one at each reconciliation. A user who
    deletes it gets another token.
    """
    if cluster.spec.sidecar.http_authentication != TOKEN:
        return ()
    return (names.child(cluster, names.ENGINE, "Secret", names.pages_name(cluster.name)),)


def tokens_required(observed: Observed, sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether all sidecars ask for tokens, as the spec wants. None: it does not, or no sidecar runs."""
    if not _is_wanted(observed.resource) or not sidecars:
        return None
    if former := [str(pod["metadata"]["name"]) for pod in observed.pods if not _has_mode(pod)]:
        count = f"{len(former)} of {len(observed.pods)} engine pods do not ask for tokens yet"
        return Condition("False", "Replacing", f"{count}. First: {former[0]}")
    if bare := [sidecar for sidecar in sidecars if sidecar.answers and not sidecar.requires_tokens]:
        count = f"{len(bare)} of {len(sidecars)} sidecars show their pages to clients without a token"
        return Condition("False", "PagesOpen", f"{count}. First: pod {bare[0].pod}: {_OPEN}")
    if silent := [sidecar for sidecar in sidecars if not sidecar.answers]:
        count = f"{len(silent)} of {len(sidecars)} sidecars do not report whether they ask for tokens"
        message = f"{count}. First: pod {silent[0].pod}. See the condition SidecarAttached"
        return Condition("Unknown", "NoAnswer", message)
    return Condition("True", "Required", f"All {len(sidecars)} sidecars ask for tokens.")


def silence_remedy(resource: Object) -> str:
    """Return what to do if sidecars do not answer the operator."""
    remedy = f"Let the operator reach port {names.SIDECAR_PORT} of the pods"
    if not _is_wanted(resource):
        return remedy
    return f"{remedy}. If it can, the sidecar may have refused its token: see the log of the sidecar"


def _is_wanted(resource: Object) -> bool:
    return bool(dig(resource, "spec", "sidecar", "httpAuthentication") == TOKEN)


def _has_mode(pod: Object) -> bool:
    """Whether a pod's sidecar has the setting."""
    containers = pod["spec"].get("initContainers") or ()
    return any(
        item["name"] == _TOKENS_DIR
        for container in containers
        if container["name"] == names.SIDECAR
        for item in container.get("env") or ()
    )
