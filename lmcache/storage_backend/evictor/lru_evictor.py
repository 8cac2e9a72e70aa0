"""The evictor that removes the least recently used chunks first."""

from __future__ import annotations

from lmcache.storage_backend.evictor.base_evictor import BaseEvictor, CacheDict, Key, PutStatus


class LRUEvictor(BaseEvictor):
    """Keeps the dictionary in order of use, and its bytes within ``MAX_CACHE_SIZE``.

    ``current_cache_size`` (bytes) is updated by each put. The evictor compares the length of the dictionary
    with the expected length. If they differ, the caller overwrote or removed a chunk, or a put failed after
    it was allowed. The next put then counts all bytes again. A put thus costs O(victims), or O(entries) after
    such a change.
    """

    def __init__(self, max_cache_size: float = 10.0) -> None:
        """Set the capacity in GiB."""
        self.MAX_CACHE_SIZE = int(max_cache_size * 1024**3)  # bytes; users may set it
        self.current_cache_size = 0
        self._num_expected = 0  # entries after the last put

    def update_on_get(self, key: Key, cache_dict: CacheDict) -> None:
        """Make the chunk the last victim. Raises KeyError if it is not in the dictionary."""
        cache_dict.move_to_end(key)

    def update_on_put(self, cache_dict: CacheDict, cache_size: int) -> tuple[list[Key], PutStatus]:
        """Choose victims from the front of the dictionary, until ``cache_size`` more bytes fit."""
        if cache_size > self.MAX_CACHE_SIZE:
            return [], PutStatus.ILLEGAL
        if len(cache_dict) != self._num_expected:
            self.current_cache_size = sum(map(self.get_size, cache_dict.values()))
        victims: list[Key] = []
        for key, kv_obj in cache_dict.items():
            if self.current_cache_size + cache_size <= self.MAX_CACHE_SIZE:
                break
            victims.append(key)
            self.current_cache_size -= self.get_size(kv_obj)
        self.current_cache_size += cache_size
        self._num_expected = len(cache_dict) - len(victims) + 1
        return victims, PutStatus.LEGAL
