"""A backend that records which of this project's functions run on the thread of SGLang's scheduler.

SGLang makes the backend on this thread. The record begins with the first lookup. It is a file with one name
per line, at the path in the environment variable ``sglang.world.TRACE``.
"""

import os
import sys
from types import FrameType
from typing import Any, TextIO

import lmcache_client
from lmcache_client.sglang.backend import LMCacheBackend
from tests.harness.sglang.world import TRACE

_FOLDER = os.path.dirname(lmcache_client.__file__)


class TracedBackend(LMCacheBackend):
    """The backend, with a record."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        super().__init__(storage_config, kwargs)
        self._names: set[str] = set()
        self._record: TextIO | None = None
        sys.setprofile(self._note)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """See ``LMCacheBackend``."""
        if self._record is None:
            self._record = open(os.environ[TRACE], "a", buffering=1)  # noqa: SIM115  # until the process ends
        return super().batch_exists(keys, extra_info)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._record is None or event != "call" or not frame.f_code.co_filename.startswith(_FOLDER):
            return
        name = f"{frame.f_globals['__name__'].rpartition('.')[2]}.{frame.f_code.co_qualname}"
        if name not in self._names:
            self._names.add(name)
            self._record.write(f"{name}\n")
