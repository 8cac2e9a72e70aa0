"""The errors that the operator raises::

    OperatorError
    ├── InvalidSpecError        the spec is invalid: the user has to change it
    ├── FileError               a file that the user named can't be read, parsed or written
    ├── NotFoundError           there is no such LMCacheCluster
    ├── NoCurveError            there is no curve of this tier to show
    ├── LeaseLostError          another operator leads: this process has to exit
    └── ApiError                a call to the API server failed
        ├── RefusedError        permanently: the request or the operator's permissions have to change
        └── UnavailableError    temporarily: a retry may succeed
            └── NoAnswerError   the API server is unreachable: other calls would fail, too

Any other exception is a bug of the operator, and is logged with its stack trace.
"""

from __future__ import annotations

QUOTA = "exceeded quota"
"""Part of a refusal by a ResourceQuota. It comes before the check whether the object exists."""


class OperatorError(Exception):
    """Base class of all errors of the operator."""


class InvalidSpecError(OperatorError):
    """An object's spec is invalid. ``path`` is the field; the message is a sentence for the user."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.path = path


class FileError(OperatorError):
    """A file can't be read, parsed or written. The message begins with its name."""


class NotFoundError(OperatorError):
    """There is no such LMCacheCluster. The message says how to list them."""


class NoCurveError(OperatorError):
    """There is no curve. The message gives the reason and a remedy."""


class LeaseLostError(OperatorError):
    """Another operator holds the Lease and may work now."""


class ApiError(OperatorError):
    """A call to the API server failed. ``message`` is the server's explanation, without the call."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.message = message


class RefusedError(ApiError):
    """The API server refused a call: 400, 403, 422 and similar, or an object that violates its schema."""


class UnavailableError(ApiError):
    """408, 409, 429 or 5xx: the API server or a webhook is unavailable, or another client wrote first."""


class NoAnswerError(UnavailableError):
    """The API server could not be reached."""
