"""Facts about one cluster: everything that the sections of a report show. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache.explain.text import plain
from lmcache_operator.commands.gather import Gathered
from lmcache_operator.commands.reports.history import History
from lmcache_operator.commands.status import status_of
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

_MAX_EVENTS = 40


@dataclass(frozen=True)
class Facts:
    """A cluster, its figures, and its past."""

    gathered: Gathered
    events: Sequence[Object] = ()
    """Events about the LMCacheCluster."""
    history: History | None = None
    """History from Prometheus; None: Prometheus was not asked."""
    since: str = ""
    """Length of the history, as the user wrote it."""
    version: str = ""
    """Version of the command."""
    problems: Sequence[str] = ()
    """Sentences about facts that could not be read, in addition to those of ``gathered``."""
    status: Mapping[str, Any] = field(init=False)
    """The answer of ``kubectl lmcache status``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "status", status_of(self.gathered))

    @property
    def cluster(self) -> Object:
        """The LMCacheCluster."""
        return self.gathered.cluster

    @property
    def name(self) -> str:
        """Namespace and name of the LMCacheCluster."""
        return f"{self.status['namespace']}/{self.status['name']}"

    @property
    def newest_events(self) -> list[tuple[str, str, str, int]]:
        """Time, reason, message and count of events, the newest first."""
        listed = [
            (
                plain(event.get("lastTimestamp")) or plain(event.get("eventTime")),
                plain(event.get("reason")),
                plain(event.get("message"), 1024),
                event.get("count") or 1,
            )
            for event in self.events
        ]
        return sorted(listed, reverse=True)[:_MAX_EVENTS]

    def versions(self) -> list[tuple[str, str]]:
        """Return the parts of the cluster with their versions."""
        sidecars = Counter(plain(stats.get("version")) or "unknown" for stats in self.gathered.stats)
        images: Counter[tuple[str, str]] = Counter()
        for figures in self.gathered.pods:
            spec = figures.pod["spec"]
            for container in [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]:
                images[str(container["name"]), str(container.get("image", "unknown"))] += 1
        return [
            ("command", self.version),
            ("resource", str(self.cluster.get("apiVersion", "unknown"))),
            *(("sidecar", f"{version} ({_pods(number)})") for version, number in sidecars.most_common()),
            *(
                (f"image of {container}", f"{image} ({_pods(number)})")
                for (container, image), number in sorted(images.items())
            ),
        ]

    @property
    def autoscaling(self) -> Mapping[str, Any]:
        """The autoscaler's part of the status; empty if there is none."""
        status = dig(self.cluster, "status", "autoscaling")
        return status if isinstance(status, Mapping) else {}


def _pods(number: int) -> str:
    return f"{number} pod{'s' if number != 1 else ''}"
