"""The references between LMCacheClusters: a change of one cluster wakes others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lmcache_operator.specs.kinds import ClusterKey


class _Known(NamedTuple):
    key: ClusterKey
    version: object
    referred: frozenset[str]
    """Names of the clusters that it refers to, in its namespace."""


class References:
    """All clusters that were reconciled, and the clusters that each refers to.

    The watch reports only metadata, so the references are those that the last reconciliations read.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], _Known] = {}

    def note(self, key: ClusterKey, referred: Iterable[str], version: object) -> list[ClusterKey]:
        """Record the present spec of a cluster. ``version`` is None if the cluster was deleted.

        Returns:
            The other clusters that the change affects: those that refer to this one, and those that it refers
            to or referred to before. Empty if the version is unchanged.
        """
        place = key.namespace, key.name
        former = self._known.get(place)
        if version is None:
            if former is None or former.key != key:
                return []
            del self._known[place]
        elif former is None or (former.key, former.version) != (key, version):
            self._known[place] = _Known(key, version, frozenset(referred))
        else:
            return []
        names = (former.referred if former else frozenset[str]()) | frozenset(referred)
        return list(self._affected(key, names))

    def _affected(self, key: ClusterKey, names: frozenset[str]) -> Iterator[ClusterKey]:
        for other in self._known.values():
            is_other = other.key.namespace == key.namespace and other.key.name != key.name
            if is_other and (other.key.name in names or key.name in other.referred):
                yield other.key
