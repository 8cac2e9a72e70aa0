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
    change_age: float | None
    """Age of the latest spec."""
    has_status: bool


def attendance(cluster: Object, now: float) -> Attendance:
    """Judge by a cluster's status. ``now``: seconds since 1970, by the clock of the API server."""
    metadata, status = cluster["metadata"], cluster.get("status") or {}
    writes = metadata.get("managedFields") or ()
    changes = [_age(each.get("time"), now) for each in writes if each.get("subresource") != "status"]
    age = _age(status.get(HEARTBEAT), now)
    change_age = min((change for change in changes if change is not None), default=None)
    is_working = None if age is None else age <= STALE_SECONDS
    if not status.get("conditions"):
        created = _age(metadata.get("creationTimestamp"), now)
        is_working = False if created is not None and created > STALE_SECONDS else is_working
        change_age = created
    is_applied = (status.get("observedGeneration") or 0) >= (metadata.get("generation") or 0)
    return Attendance(is_working, is_applied, age, change_age, bool(status.get("conditions")))


def _age(text: object, now: float) -> float | None:
    """Return the age of a time of the API server; None if there is no such time."""
    try:
        return max(0.0, now - datetime.fromisoformat(str(text)).timestamp())
    except ValueError:
        return None


def sentence(judged: Attendance, name: str) -> str:
    """Return what the user has to know of the operator; empty: it works, and the latest spec is processed."""
    if judged.is_working is False and not judged.has_status:
        age = seconds_in_words(judged.change_age or 0.0)
        return f"No operator works on {name}: it has no status, {age} after its creation."
    if judged.is_working is False:
        more = "" if judged.is_applied else ", and your last change is not applied"
        age = seconds_in_words(judged.heartbeat_age or 0.0)
        return f"No operator works on {name}: the conditions are {age} old{more}."
    if judged.is_applied:
        return ""
    ago = "" if judged.change_age is None else f"{seconds_in_words(judged.change_age)} ago"
    if not judged.has_status:
        return f"The operator has not reported on {name} yet" + (f": it was created {ago}." if ago else ".")
    change = f"Your change of {ago} is not applied yet." if ago else "Your last change is not applied yet."
    if judged.heartbeat_age is None:
        return change
    return (
        f"{change} The operator works: its last heartbeat was {seconds_in_words(judged.heartbeat_age)} ago."
    )
