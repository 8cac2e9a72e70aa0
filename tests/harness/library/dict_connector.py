"""A remote store inside the process that can fail, stall and count its calls."""

import threading
from collections import Counter

from lmcache.storage_backend.connector.base_connector import RemoteBytesConnector


class DictConnector(RemoteBytesConnector):
    """``calls`` counts calls by method, and also by ``(method, key)``."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.calls: Counter[object] = Counter()
        self.is_down = False
        self.error: Exception = ConnectionError("the server is down")
        self.is_closed = False
        self.may_answer = threading.Event()
        self.may_answer.set()

    def exists(self, key: str) -> bool:
        self._called("exists", key)
        return key in self.values

    def get(self, key: str) -> bytes | None:
        self._called("get", key)
        return self.values.get(key)

    def set(self, key: str, obj: bytes) -> None:
        self._called("set", key)
        if len(key) > 150:
            raise ValueError("the key is too long")
        self.values[key] = bytes(obj)

    def list(self) -> list[str]:
        self._called("list", "")
        return [*self.values]

    def close(self) -> None:
        self.is_closed = True

    def _called(self, method: str, key: str) -> None:
        self.calls["after close"] += self.is_closed
        self.calls[method] += 1
        self.calls[method, key] += 1
        assert self.may_answer.wait(60)
        if self.is_down:
            raise self.error
