"""Keywords for fields of several parts: names, images, sizes."""

from __future__ import annotations

import re
from typing import Any

from lmcache_operator.api.fields import Rule
from lmcache_operator.api.grammar import IMAGE
from lmcache_store.common.units import SIZE_PATTERN, parse_quantity

NAME: dict[str, Any] = {"maxLength": 253, "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
SECRET_KEY: dict[str, Any] = {"maxLength": 253, "pattern": r"^[-._a-zA-Z0-9]+$"}
# The longest child name is "<name>-engine-<ten-letter revision>" as a label value: at most 63.
CLUSTER_NAME_PATTERN = "^[a-z]([-a-z0-9]{0,43}[a-z0-9])?$"
CLUSTER_NAME = Rule(
    f"self.metadata.name.matches('{CLUSTER_NAME_PATTERN}')",
    "metadata.name must start with a letter, hold only a-z, 0-9 and '-', and have at most 45 characters",
    lambda name: re.fullmatch(CLUSTER_NAME_PATTERN, name) is not None,
)
_MAX_LENGTH = 37
_SUFFIX = "-prefill"
_NO_PEERS_REF = "!has(self.spec.tiers.peers) || !has(self.spec.tiers.peers.clusterRef)"
NAMING = (
    Rule(
        f"{_NO_PEERS_REF} || self.spec.tiers.peers.clusterRef.name != self.metadata.name",
        "spec.tiers.peers.clusterRef must name another LMCacheCluster: leave it out for this one's own peers",
        lambda cluster: (
            not ((peers := cluster.spec.tiers.peers) and peers.cluster_ref)
            or peers.cluster_ref.name != cluster.name
        ),
    ),
    Rule(
        "!has(self.spec.engine) || !has(self.spec.engine.prefill) || "
        f"(self.metadata.name.size() <= {_MAX_LENGTH} && !self.metadata.name.endsWith('{_SUFFIX}'))",
        "with spec.engine.prefill, metadata.name must have at most 37 characters and must not end with "
        "-prefill, because NAME-prefill is the LMCacheCluster of the prefill pods",
        lambda cluster: (
            not (cluster.spec.engine and cluster.spec.engine.prefill)
            or (len(cluster.name) <= _MAX_LENGTH and not cluster.name.endswith(_SUFFIX))
        ),
    ),
    # The longest child name is then "<name>-engine-999-<ten-letter revision>".
    Rule(
        "!has(self.spec.engine) || self.spec.engine.nodes == 1 || self.metadata.name.size() <= 41",
        "with spec.engine.nodes > 1, metadata.name must have at most 41 characters",
        lambda cluster: not (engine := cluster.spec.engine) or engine.nodes == 1 or len(cluster.name) <= 41,
    ),
)
"""Rules that an LMCacheCluster's name and its spec must follow together."""


ARGUMENTS: dict[str, Any] = {
    "maxItems": 64,
    "items": {"type": "string", "maxLength": 4096, "pattern": r"^[^\x00]*$"},
}


def matches(pattern: str, message: str) -> Rule:
    """Return the rule that a text matches a pattern, with a message that is clearer than the pattern."""
    return Rule(f"self.matches(r'{pattern}')", message, lambda text: re.fullmatch(pattern, text) is not None)


def needs_engine(field: str, remedy: str) -> Rule:
    """Return the rule of the spec that a field of it needs an engine."""
    return Rule(
        f"!has(self.{field}) || has(self.engine)",
        f"{field} needs an engine: {remedy}",
        lambda spec: getattr(spec, field) is None or spec.engine is not None,
    )


def size_between(path: str, smallest: str, largest: str) -> dict[str, Any]:
    """Return the keywords of a field for a size within bounds. ``path`` is its name in messages."""
    in_bounds = Rule(
        f"!isQuantity(self) || (quantity(self).compareTo(quantity('{smallest}')) >= 0 && "
        f"quantity(self).compareTo(quantity('{largest}')) <= 0)",
        f"{path} must be between {smallest} and {largest}",
        lambda size: parse_quantity(smallest) <= parse_quantity(size) <= parse_quantity(largest),
    )
    is_size = matches(SIZE_PATTERN, "must be an amount of bytes such as 64Gi or 0.5Ti")
    return {"maxLength": 20, "rules": (is_size, in_bounds)}


_IS_IMAGE = matches(IMAGE, "must be an image such as registry.example/team/vllm:v1, by tag or digest")
IMAGE_NAME: dict[str, Any] = {"maxLength": 512, "rules": (_IS_IMAGE,)}
