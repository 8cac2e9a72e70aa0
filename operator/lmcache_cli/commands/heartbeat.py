"""Whether an operator works on an LMCacheCluster: by the heartbeat that it writes into the status. Pure."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from lmcache_operator.api import HEARTBEAT
from lmcache_operator.specs import Object
from lmcache_store.common.units import seconds_in_words

STALE_SECONDS = 150.0
"""Age of a heartbeat from which on no operator works: it writes one each minute, and one may be lost."""


class Attendance(NamedTuple):
    """Work of the operator, as the status of a cluster shows it. Ages are in seconds; None: unknown."""

    is_working: bool | None
    """Whether an operator works; None: unknown, because the cluster is new or the operator is old."""
    is_applied: bool
    """Whether the operator has processed the latest spec."""
    heartbeat_age: float | None
    creation_age: float | None
    has_status: bool


def attendance(cluster: Object, now: float) -> Attendance:
    """Judge by a cluster's status. ``now``: seconds since 1970, by the clock of the API server."""
    metadata, status = cluster["metadata"], cluster.get("status") or {}
    age, created = _age(status.get(HEARTBEAT), now), _age(metadata.get("creationTimestamp"), now)
    is_working = None if age is None else age <= STALE_SECONDS
    if not status.get("conditions") and created is not None and created > STALE_SECONDS:
        is_working = False
    is_applied = (status.get("observedGeneration") or 0) >= (metadata.get("generation") or 0)
    return Attendance(is_working, is_applied, age, created, bool(status.get("conditions")))


def _age(text: object, now: float) -> float | None:
    """Return the age of a time of the API server; None if there is no such time."""
    try:
        return max(0.0, now - datetime.fromisoformat(str(text)).timestamp())
    except ValueError:
        return None


def sentence(judged: Attendance, name: str) -> str:
    """Return what the user has to know of the operator; empty: it works, and the latest spec is processed."""
    age = seconds_in_words(judged.heartbeat_age or 0.0)
    created = "" if judged.creation_age is None else seconds_in_words(judged.creation_age)
    if judged.is_working is False and not judged.has_status:
        return f"No operator works on {name}: it has no status, {created} after its creation."
    if judged.is_working is False:
        more = "" if judged.is_applied else ", and your last change is not applied"
        return f"No operator works on {name}: the conditions are {age} old{more}."
    if judged.is_applied:
        return ""
    if not judged.has_status:
        about = f": it was created {created} ago" if created else ""
        return f"The operator has not reported on {name} yet{about}."
    # An operator that ended a moment ago has a fresh heartbeat, too.
    reported = "" if judged.heartbeat_age is None else f" An operator last reported {age} ago."
    return f"Your last change is not applied yet.{reported}"
