"""What the storage core can raise. A miss is a value, never one of these.

::

    TierError
    ├── ArenaError              the arena can't be made, grown or adopted
    ├── StaleSlotError          a slot was named by somebody who does not hold it: nothing was changed
    ├── TierUnavailableError    a lower tier did not answer, or its circuit is open
    ├── DiskError               the directory can't be used for a disk tier
    │   └── DirectoryInUseError
    ├── HeaderError             bytes that are no header of this version
    ├── InvalidObjectError      what is stored is not what its name says
    └── ServerError             an error reply of a Redis server

A caller that only wants to go on without a tier catches ``TierUnavailableError``; ``InvalidObjectError`` and
``ServerError`` never leave the tier that counts them.
"""

from __future__ import annotations

import re

_CODE = re.compile("[A-Z][A-Z0-9_]{0,31}")
_MAX_MESSAGE = 200


class TierError(Exception):
    """Base of all errors of the tiers; a miss is a value, never an exception."""


class ArenaError(TierError):
    """The arena can't be made, grown or adopted: the message says how much is needed, and where."""


class StaleSlotError(TierError):
    """A slot was named by a generation that is over, or by somebody who does not hold it. Nothing was
    changed."""


class TierUnavailableError(TierError):
    """A lower tier did not answer within its deadline, or its circuit is open."""


class DiskError(TierError):
    """The directory can't be used for a disk tier: the message says why, and what to do."""


class DirectoryInUseError(DiskError):
    """Somebody else has the directory."""


class InvalidObjectError(TierError):
    """What is stored under a name is not what the name says; the message is the reason, as it is counted."""


class HeaderError(TierError):
    """The bytes are not a header of this version; the message says what is wrong."""


class ServerError(TierError):
    """An error reply; ``code`` is its first word (``LOADING``, ``OOM``, ...), or ``ERR`` where that is none.
    What it repeats of the command is cut off: that may be anything, and the message goes to the log."""

    def __init__(self, message: str) -> None:
        message = message.partition(", with args beginning with")[0]
        super().__init__(message[:_MAX_MESSAGE])
        code = message.split(" ", 1)[0]
        self.code = code if _CODE.fullmatch(code) else "ERR"
