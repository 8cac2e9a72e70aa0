"""The memory tier grows and shrinks to the size that it is to have now, while engines use it."""

from __future__ import annotations

from lmcache.tiers.memory.arena import ArenaFile
from lmcache_sidecar.followed import SizeFile


class Resizer:
    """One event loop owns it; ``size`` is followed by somebody else."""

    def __init__(self, arena: ArenaFile, size: SizeFile) -> None:
        self._arena = arena
        self._size = size
        self._wait = ""

    @property
    def problem(self) -> str:
        """Why the memory tier is not (yet) as large as it is to be; empty: it is, or is on its way."""
        return self._size.problem or self._arena.growth_error or self._wait

    def step(self) -> None:
        """Do what can be done now."""
        wanted = self._size.num_bytes
        if wanted < self._arena.target_bytes:
            self._wait = "the memory tier can't be made smaller while it is used"
            return
        self._wait = ""
        if wanted != self._arena.target_bytes:
            self._arena.resize(wanted)
