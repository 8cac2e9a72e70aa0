"""A backend that is off in one of two tensor-parallel ranks, while a file exists."""

import os

from lmcache_client.sglang.backend import LMCacheBackend
from tests.harness.sglang.world import SWITCH


class HalfOff(LMCacheBackend):
    """Goes offline in rank 1, as after an unexpected error, while the file in the variable SWITCH exists."""

    _has_failed = False

    @property
    def _is_offline(self) -> bool:
        return self._has_failed or (self._config.tp_rank == 1 and os.path.exists(os.environ[SWITCH]))

    @_is_offline.setter
    def _is_offline(self, value: bool) -> None:
        self._has_failed = value
