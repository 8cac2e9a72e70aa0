"""A backend with a fault, as a proof that comparisons of answers notice wrong KV."""

from typing import Any

from lmcache_client.sglang.backend import LMCacheBackend


class MixedUpPages(LMCacheBackend):
    """Loads the first page that the engine has stored in place of the last page of each request."""

    _first_key = ""

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """See ``LMCacheBackend``."""
        self._first_key = self._first_key or keys[0]
        return super().batch_set_v1(keys, host_indices, extra_info)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:
        """See ``LMCacheBackend``."""
        return super().batch_get_v1([*keys[:-1], self._first_key], host_indices, extra_info)
