"""Records on objects: default images of the operator that created them, and other clusters. Pure."""

from __future__ import annotations

import contextlib
import json
import re
from typing import Any

from lmcache_operator.api.parse import Cluster, Lender
from lmcache_operator.specs import Images, Object, names

_LENDER = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?/([a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?)?")
"""Text of a lender in a record: its uid and its certificate, which are parts of names of Secrets."""


def recorded(images: Images) -> dict[str, str]:
    """The annotation that records default images by container."""
    return {names.DEFAULT_IMAGES: json.dumps(images, sort_keys=True)}


def recorded_in(live: Object | None, annotation: str = names.DEFAULT_IMAGES) -> dict[str, str]:
    """The texts that an annotation of an existing object records, by name. By default the default images.

    Empty if there is no valid record.
    """
    record: dict[Any, Any] = {}
    with contextlib.suppress(ValueError, TypeError, KeyError, RecursionError):
        record = dict(json.loads(names.annotations_of(live)[annotation])) if live else {}
    return {name: text for name, text in record.items() if isinstance(name, str) and isinstance(text, str)}


def recorded_lenders(cluster: Cluster) -> dict[str, str]:
    """The annotation that records the clusters whose tiers a cluster uses; none without such clusters."""
    texts = {name: "/".join(lender) for name, lender in cluster.lenders.items()}
    return {names.LENDERS: json.dumps(texts, sort_keys=True)} if texts else {}


def lenders_in(live: Object | None) -> dict[str, Lender]:
    """The recorded clusters of an existing object, by name, without damaged records."""
    texts = recorded_in(live, names.LENDERS)
    return {name: Lender(*text.split("/")) for name, text in texts.items() if _LENDER.fullmatch(text)}


def default_image(cluster: Cluster, live: Object | None, container: str, present: str) -> str:
    """Default image of a container: the recorded one of the existing object, or else the present one.

    With ``spec.images.policy`` Follow, it is always the operator's present default.
    """
    keeps = cluster.spec.images.policy != "Follow"
    return recorded_in(live).get(container, present) if keeps else present
