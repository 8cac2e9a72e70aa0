"""Tokens for the sidecar's pages: the token that it mounts, its options, and texts for conditions. Pure."""

from __future__ import annotations

from lmcache_operator.api.types import TOKEN_REVIEW
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig

VOLUME = "api-access"
_TOKEN_SECONDS = 3600
"""Lifetime of the token. The kubelet renews it earlier, and the sidecar reads it at each review."""
_AUTHORITY = "kube-root-ca.crt"
"""ConfigMap with the API server's authority, which Kubernetes creates in each namespace."""


def options(authentication: str) -> dict[str, str]:
    """Variables of the sidecar; none without authentication.

    These are variables and not keys of the shared file, because only pods that mount the token may get them.
    """
    if authentication != TOKEN_REVIEW:
        return {}
    return {
        "LMCACHE_HTTP_AUTHENTICATION": TOKEN_REVIEW,
        "LMCACHE_HTTP_AUTHENTICATION_DIR": paths.API_ACCESS_DIR,
    }


def token_volume() -> Object:
    """The volume source of the sidecar's token for the API server. A missing authority stops no pod."""
    token = {"expirationSeconds": _TOKEN_SECONDS, "path": "token"}
    authority = {"items": [{"key": "ca.crt", "path": "ca.crt"}], "name": _AUTHORITY, "optional": True}
    return {"projected": {"sources": [{"serviceAccountToken": token}, {"configMap": authority}]}}


def silence_remedy(resource: Object) -> str:
    """Return what to do if sidecars do not answer the operator."""
    remedy = f"Let the operator reach port {names.SIDECAR_PORT} of the pods"
    if dig(resource, "spec", "sidecar", "httpAuthentication") != TOKEN_REVIEW:
        return remedy
    return f"{remedy}. If it can, the sidecar may have refused its token: see the log of the sidecar"
