"""Errors of the storage core. A miss is a value, never an error.

::

    TierError
    ├── ArenaError              the arena can't be made, grown or adopted
    ├── StaleSlotError          the caller does not hold a slot that it named; nothing was changed
    ├── TierUnavailableError    a lower tier did not answer, or its circuit is open
    ├── DiskError               the directory is unusable for a disk tier
    │   └── DirectoryInUseError
    ├── InvalidObjectError      a stored object that does not match its name
    ├── KeyAbsentError          a stored object that is encrypted with a key that is not here
    ├── NoKeyError              no encryption key could be read yet
    └── ServerError             an error reply of a Redis server

A caller that can continue without a tier catches ``TierUnavailableError``. ``InvalidObjectError``,
``KeyAbsentError`` and ``ServerError`` never leave the tier, which counts them.
"""

from __future__ import annotations

import re

_CODE = re.compile("[A-Z][A-Z0-9_]{0,31}")
_MAX_MESSAGE = 200


class TierError(Exception):
    """Base class of all errors of the tiers."""


class ArenaError(TierError):
    """The arena can't be created, grown or adopted. The message says how much memory is needed, and where."""


class StaleSlotError(TierError):
    """The caller named a slot of an old generation, or a slot that it does not hold. Nothing was changed."""


class TierUnavailableError(TierError):
    """A lower tier did not answer within its deadline, or its circuit is open."""


class DiskError(TierError):
    """The directory is unusable for a disk tier. The message says why, and what to do."""


class DirectoryInUseError(DiskError):
    """Another process uses the directory."""


class InvalidObjectError(TierError):
    """A stored object does not match its name. The message is the reason under which it is counted."""


class KeyAbsentError(TierError):
    """A stored object is encrypted, and this process lacks its key version. The object may be valid."""


class NoKeyError(TierError):
    """No encryption key could be read yet. The message says why, and what to do."""


class ServerError(TierError):
    """An error reply of a Redis server. ``code`` is its first word (``LOADING``, ``OOM``, ...), or ``ERR`` if
    that word is not a code.

    The message goes to the log. The part that repeats arguments of the command is cut off: it may hold a
    secret."""

    def __init__(self, message: str) -> None:
        message = message.partition(", with args beginning with")[0]
        super().__init__(message[:_MAX_MESSAGE])
        code = message.split(" ", 1)[0]
        self.code = code if _CODE.fullmatch(code) else "ERR"
