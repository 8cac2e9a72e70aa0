"""Errors that a call to the sidecar can raise.

::

    SidecarError
    ├── SidecarUnavailableError   no answer: the call may or may not have been carried out
    ├── StaleSessionError         the session's epoch is over: use the client's present session
    └── RpcRefusedError           the sidecar refused the call and changed nothing; see the message
        └── EngineCopiesError     the sidecar can't copy stores: the engine must copy them

To continue without the cache after any of them, catch ``SidecarError``.
"""

from __future__ import annotations

import grpc


class SidecarError(Exception):
    """Base of all errors that a session's calls raise."""


class SidecarUnavailableError(SidecarError):
    """The sidecar did not answer: no connection, or a missed deadline. It may have carried out the call."""


class StaleSessionError(SidecarError):
    """The session's epoch is over, and the call changed nothing. Use the client's present session."""


class RpcRefusedError(SidecarError):
    """The sidecar refused the call and changed nothing."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class EngineCopiesError(RpcRefusedError):
    """The sidecar can't read this client's GPU memory; the message gives the reason.

    The engine must copy these slots and all later ones.
    """
