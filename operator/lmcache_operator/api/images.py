"""Images of pods: which defaults they follow, and the Secrets that pull them."""

from __future__ import annotations

from lmcache_operator.api.fields import Part, Rule, field
from lmcache_operator.api.keywords import NAME

_NO_DUPLICATES = Rule(None, "names a Secret twice: remove one", lambda names: len({*names}) == len(names))


class ImageDefaults(Part):
    """Choice of images for containers without an ``image`` field, and the Secrets that pull all images."""

    policy: str = field(
        "Keep: images of the operator that created the cluster, so that an upgrade of the operator replaces "
        "no pod. Follow: images of the present operator; its upgrade replaces pods one at a time. To update "
        "images once, set Follow, then Keep.",
        default="Keep",
        enum=["Keep", "Follow"],
    )
    pull_secrets: list[str] = field(
        "Names of Secrets with logins for registries, in the same namespace. All pods of the operator get "
        "them as imagePullSecrets. Your own pods with an injected sidecar do not. A change replaces the "
        "pods.",
        default=[],
        maxItems=10,
        items={"type": "string", **NAME},
        **{"x-kubernetes-list-type": "set"},
        rules=(_NO_DUPLICATES,),
    )


class ImagesStatus(Part):
    """Images of new pods."""

    engine: str | None = field("Image of the engine.")
    sidecar: str | None = field("Image of the sidecar, and of the connector in the engine.")
    message: str | None = field("Newer default images of the operator, and how to get them.")
