"""What a call to the sidecar can raise.

::

    SidecarError
    ├── SidecarUnavailableError   no answer: the call may or may not have been done
    ├── StaleSessionError         the session's epoch is over: take the client's present session
    └── RpcRefusedError           the sidecar said no and changed nothing; the message says what to do
        └── EngineCopiesError     the sidecar does not copy stores (any more): copy them yourself

A caller that only wants to go on without the cache catches ``SidecarError``.
"""

from __future__ import annotations

import grpc


class SidecarError(Exception):
    """Base of everything that a session's calls raise."""


class SidecarUnavailableError(SidecarError):
    """No answer: detached, deadline passed or connection lost. The call may or may not have been done."""


class StaleSessionError(SidecarError):
    """The session's epoch is over. Nothing was done; take the client's present session."""


class RpcRefusedError(SidecarError):
    """The sidecar refused the call and changed nothing."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class EngineCopiesError(RpcRefusedError):
    """The sidecar can't read this client's GPU memory, and the message says why: the engine copies from now
    on, these slots, too."""
