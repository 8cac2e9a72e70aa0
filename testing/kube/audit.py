"""The API server's audit log: who wrote what, and with which result; and who read an LMCacheCluster."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN_ID = "authentication.kubernetes.io/credential-id"


@dataclass(frozen=True)
class Request:
    """One answered request, as the audit log has it."""

    user: str
    verb: str
    resource: str
    namespace: str
    name: str
    code: int
    message: str
    """Why it was refused."""
    uri: str
    token: str
    """Id of the user's token, as returned by `testing.kube.operator.token_id`."""
    received: str
    answered: str
    """ISO times with microseconds, by the API server's clock."""


class AuditLog:
    """The log of one API server, in a file that is never rotated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def position(self) -> int:
        """The current end of the log, for `since`."""
        return self.path.stat().st_size

    def since(self, position: int) -> list[Request]:
        """Recorded requests answered since ``position``."""
        with self.path.open("rb") as log:
            log.seek(max(position - 1, 0))
            # The first line is empty or incomplete at the position. The last line may be incomplete now.
            lines = log.read().split(b"\n")[bool(position) : -1]
        return [_request(json.loads(line)) for line in lines]


def _request(event: dict[str, Any]) -> Request:
    ref, status = event.get("objectRef", {}), event.get("responseStatus", {})
    return Request(
        user=event["user"]["username"],
        verb=event["verb"],
        resource="/".join(filter(None, (ref.get("resource"), ref.get("subresource")))),
        namespace=ref.get("namespace", ""),
        name=ref.get("name", ""),
        code=status.get("code", 0),
        message=status.get("message", ""),
        uri=event["requestURI"],
        token="".join(event["user"].get("extra", {}).get(TOKEN_ID, [])),
        received=event["requestReceivedTimestamp"],
        answered=event["stageTimestamp"],
    )
