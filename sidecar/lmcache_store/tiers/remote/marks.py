"""Marks of documents in Redis: one sorted set for each namespace, which the sidecars of all pods share.

The name is that of a row, and ``:documents``. A member is a mark, or an encrypted one (``value_formats.py``).
Its score is the Unix time in seconds at which a sidecar added it. A mark only proposes that a prompt contains
a document, so members of other writers do no harm; their number and length are bounded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

from lmcache_store.tiers.base import RowKey
from lmcache_store.tiers.errors import InvalidObjectError, ServerError
from lmcache_store.tiers.remote.objects import row_name
from lmcache_store.tiers.remote.resp import RespConnection
from lmcache_store.tiers.remote.value_formats import ValueFormat

COMMANDS = "ZADD", "ZREMRANGEBYRANK", "EXPIRE", "ZREVRANGEBYSCORE"
"""Commands that a user needs for marks."""

_BATCH = 4096
"""Largest number of members in a command or a reply."""

_MAX_MEMBER_BYTES = 64
_EXPIRE_SECONDS = 30 * 24 * 3600


class MarksQuery(NamedTuple):
    """The marks to read: those with a score of ``since`` or more, the ``limit`` newest ones."""

    since: int
    limit: int


def row_key_of(namespace: bytes) -> RowKey:
    """Return the row key that determines name and server of a namespace's marks. No chunk has this key."""
    return namespace + namespace


def set_name(prefix: str, namespace: bytes, form: ValueFormat) -> str:
    """Name the sorted set of a namespace."""
    return f"{row_name(prefix, row_key_of(namespace), form)}:documents"


def exchange(
    connection: RespConnection, name: str, added: Sequence[bytes], now: int, capacity: int, query: MarksQuery
) -> list[bytes]:
    """Add members with the score ``now``, and read members. The oldest of these come first.

    The set keeps the ``capacity`` newest members. A value of another type is deleted, and ServerError raised.
    Raises InvalidObjectError for a member that is much too long: the connection can't be used again.
    """
    try:
        for start in range(0, len(added), _BATCH):
            words = [word for member in added[start : start + _BATCH] for word in (str(now), member)]
            _call_all(
                connection,
                ("ZADD", name, *words),
                ("ZREMRANGEBYRANK", name, "0", str(-capacity - 1)),
                ("EXPIRE", name, str(_EXPIRE_SECONDS)),
            )
        return _read(connection, name, query)
    except ServerError as error:
        if error.code == "WRONGTYPE":
            with contextlib.suppress(ServerError):
                connection.call("UNLINK", name)
        raise


def _call_all(connection: RespConnection, *commands: Sequence[str | bytes]) -> None:
    for reply in connection.call_all(commands):
        if isinstance(reply, ServerError):
            raise reply


def _read(connection: RespConnection, name: str, query: MarksQuery) -> list[bytes]:
    members: list[bytes] = []
    while (wanted := min(_BATCH, query.limit - len(members))) > 0:
        page_limit = "LIMIT", str(len(members)), str(wanted)
        connection.ask([("ZREVRANGEBYSCORE", name, "+inf", str(query.since), *page_limit)])
        try:
            page = connection.read_strings(wanted, _MAX_MEMBER_BYTES)
        except InvalidObjectError:
            problem = f"another program wrote members of {name}: delete the key"
            raise InvalidObjectError(problem) from None
        members += page
        if len(page) < wanted:
            break
    return members[::-1]
