"""A backend that holds its writes, so that SGLang's storage has work to do for as long as a test needs."""

import fcntl
import logging
import os
from typing import Any

from lmcache_client.sglang.backend import LMCacheBackend
from tests.harness.sglang.world import HELD_WRITE, SWITCH


class HeldWrites(LMCacheBackend):
    """Begins no write while a test holds the lock of the file in the variable SWITCH."""

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """See ``LMCacheBackend``."""
        with open(os.environ[SWITCH]) as switch:
            try:
                fcntl.flock(switch, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                logging.getLogger(__name__).warning(HELD_WRITE)
                fcntl.flock(switch, fcntl.LOCK_SH)
        return super().batch_set_v1(keys, host_indices, extra_info)
