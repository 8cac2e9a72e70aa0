"""Tokens for the sidecar's pages: the token that it mounts, its options, and the condition. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lmcache_operator.api.types import TOKEN_REVIEW
from lmcache_operator.components.base import Observed, Sidecar
from lmcache_operator.components.conditions import Condition
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig

TOKENS_REQUIRED: Final = "TokensRequired"
"""Type of the condition."""

VOLUME = "api-access"
_TOKEN_SECONDS = 3600
"""Lifetime of the token. The kubelet renews it earlier, and the sidecar reads it at each review."""
_AUTHORITY = "kube-root-ca.crt"
"""ConfigMap with the API server's authority, which Kubernetes creates in each namespace."""
_MODE = "LMCACHE_HTTP_AUTHENTICATION"
_OPEN = (
    "it does not ask for tokens. If its image is of an earlier version, set spec.images.policy to Follow, or "
    "spec.sidecar.image to a later image"
)


def options(authentication: str) -> dict[str, str]:
    """Variables of the sidecar; none without authentication.

    These are variables and not keys of the shared file, because only pods that mount the token may get them.
    """
    if authentication != TOKEN_REVIEW:
        return {}
    return {
        _MODE: TOKEN_REVIEW,
        "LMCACHE_HTTP_AUTHENTICATION_DIR": paths.API_ACCESS_DIR,
    }


def token_volume() -> Object:
    """The volume source of the sidecar's token for the API server. A missing authority stops no pod."""
    token = {"expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    authority = {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": _AUTHORITY, "optional": True}
    return {"projected": {"sources": [{"serviceAccountToken": token}, {"configMap": authority}]}}


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
    return bool(dig(resource, "spec", "sidecar", "httpAuthentication") == TOKEN_REVIEW)


def _has_mode(pod: Object) -> bool:
    """Whether a pod's sidecar has the setting."""
    containers = pod["spec"].get("initContainers") or ()
    return any(
        item["name"] == _MODE
        for container in containers
        if container["name"] == names.SIDECAR
        for item in container.get("env") or ()
    )
