"""Default images that stay those of the operator that created an object. Pure."""

from __future__ import annotations

import contextlib
import json

from lmcache_operator.api.parse import Cluster
from lmcache_operator.specs import Object, names


def recorded(container: str, image: str) -> dict[str, str]:
    """The annotation that records the default image of a container."""
    return {names.DEFAULT_IMAGES: json.dumps({container: image})}


def default_image(cluster: Cluster, live: Object | None, container: str, present: str) -> str:
    """Default image of a container: the recorded one of the existing object, or else the present one.

    With ``spec.images.policy`` Follow, it is always the operator's present default.
    """
    if live is not None and cluster.spec.images.policy != "Follow":
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return str(json.loads(names.annotations_of(live)[names.DEFAULT_IMAGES])[container])
    return present
