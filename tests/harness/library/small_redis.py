"""Clients of Redis with only the methods that the documentation requires, over a dict."""

import fnmatch
from typing import Any, ClassVar


class SmallRedis:
    """A client that is created with host and port only."""

    arguments: ClassVar[dict[str, Any]] = {}  # of the last client

    def __init__(self, host, port):
        type(self).arguments = {"host": host, "port": port}
        self.values, self.closed = {}, False

    def get(self, key):
        return self.values.get(key)

    def set(self, key, value):
        self.values[key] = value

    def exists(self, key):
        return int(key in self.values)

    def scan(self, cursor=0, match=None):
        names = [name for name in self.values if match is None or fnmatch.fnmatchcase(str(name), match)]
        rest = names[cursor : cursor + 2]
        return (cursor + 2 if cursor + 2 < len(names) else 0), rest

    def close(self):
        self.closed = True
