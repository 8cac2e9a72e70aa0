"""Default images that stay those of the operator that created an object. Pure."""

from __future__ import annotations

import contextlib
import json

from lmcache_operator.api.parse import Cluster
from lmcache_operator.specs import Images, Object, names


def recorded(images: Images) -> dict[str, str]:
    """The annotation that records default images by container."""
    return {names.DEFAULT_IMAGES: json.dumps(images, sort_keys=True)}


def recorded_in(live: Object | None) -> Images:
    """The recorded default images of an existing object; empty if there is no valid record."""
    record: Images = {}
    with contextlib.suppress(ValueError, TypeError, KeyError):
        record = dict(json.loads(names.annotations_of(live)[names.DEFAULT_IMAGES])) if live else {}
    return {name: image for name, image in record.items() if isinstance(image, str)}


def default_image(cluster: Cluster, live: Object | None, container: str, present: str) -> str:
    """Default image of a container: the recorded one of the existing object, or else the present one.

    With ``spec.images.policy`` Follow, it is always the operator's present default.
    """
    keeps = cluster.spec.images.policy != "Follow"
    return recorded_in(live).get(container, present) if keeps else present
