"""Everything the operator raises on purpose, one tree::

    OperatorError
    ├── InvalidSpecError        the declaration can't be carried out: it has to change first
    ├── FileError               a file that was given can't be used
    ├── NoCurveError            nothing is known, of a cluster's tier, that could be shown
    ├── LeaseLostError          another operator leads: this one has to end
    └── ApiError                a call to the API server failed
        ├── RefusedError        for good: the request, or the operator's permissions, have to change first
        └── UnavailableError    for now: the same call may succeed when it is made again
            └── NoAnswerError   not even an answer came: no other call would fare better

Anything else that is raised is a fault of the operator, and is logged with its stack.
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of what the operator raises."""


class InvalidSpecError(OperatorError):
    """The object can't be what it asks for. ``path`` is where, the message is a sentence for the user."""

    def __init__(self, path: str, sentence: str) -> None:
        super().__init__(f"{path}: {sentence}")
        self.path = path


class FileError(OperatorError):
    """A file that was given can't be used; the message begins with its name."""


class NoCurveError(OperatorError):
    """There is no curve; the message says why, and what to do."""


class LeaseLostError(OperatorError):
    """Another operator may work now."""


class ApiError(OperatorError):
    """A call failed; ``message`` is what the API server says about it, without the call."""

    def __init__(self, what: str, message: str) -> None:
        super().__init__(f"{what}: {message}")
        self.message = message


class RefusedError(ApiError):
    """400, 403, 422 and the like, and an object that does not fit the schema."""


class UnavailableError(ApiError):
    """408, 409, 429 or 5xx: the server, or a webhook it asks, is busy or gone, or somebody was faster."""


class NoAnswerError(UnavailableError):
    """The API server could not be reached."""
