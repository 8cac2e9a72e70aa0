"""The features of the engine pod. A new feature is a module here, and one line in ``FEATURES``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from lmcache_operator.components.engine.features.base import PodFeature
from lmcache_operator.components.engine.features.disk import DiskFeature
from lmcache_operator.components.engine.features.encryption import Encryption
from lmcache_operator.components.engine.features.peers import PeersFeature
from lmcache_operator.components.engine.features.pinning import Pinning
from lmcache_operator.components.engine.features.remote import RemoteFeature
from lmcache_operator.components.engine.features.sharing import Sharing
from lmcache_operator.components.engine.features.tenants import TenantBudgets
from lmcache_operator.components.engine.features.tokens import Tokens

_Value = TypeVar("_Value")
_Key = TypeVar("_Key")

FEATURES: tuple[PodFeature[Any], ...] = (
    RemoteFeature(),
    DiskFeature(),
    PeersFeature(),
    Pinning(),
    Sharing(),
    Encryption(),
    Tokens(),
    TenantBudgets(),
)
"""All features, in the order in which their problems are reported."""
TIERS = tuple(feature for feature in FEATURES if feature.is_tier)
"""The features that lookups can hit in."""


def merged(part: Callable[[PodFeature[Any]], Mapping[_Key, _Value]]) -> dict[_Key, _Value]:
    """One mapping of all features, such as their labels. ``part``: the mapping of a feature."""
    return {key: value for feature in FEATURES for key, value in part(feature).items()}
