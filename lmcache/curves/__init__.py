"""Miss-ratio curves: what hit ratio would an LRU cache of any size have had on these accesses? Pure.

Fixed-size SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15): only keys whose
hash lies under a threshold are tracked; of them the exact stack distance in bytes is known, and divided by
the sampling rate it estimates that of all keys. When more keys are tracked than wanted, the threshold comes
down and those above it go, so memory and time are bounded whatever the load.

**Requests are looked up whole**: a cache looks for all keys of a prompt before it stores any, so a long
prompt does not push out its own chunks. They are given tail first, as the tiers touch them: a chunk is then
never nearer than those it depends on, and a hit of the curve is a hit of a whole prefix.

**Hot keys.** The first chunk of a system prompt is sampled or not, and with it a large share of all accesses:
sampling alone would be points off. So samplers keep the head of every chain whatever its hash; the few keys
that turn out hot (Misra-Gries) are tracked apart from the others, with a weight of 1.

**The total is known** (``count_accesses``), and what sampling estimates it to be is not quite it. The error
of the total tells of the error of the hits: a regression over 16 independent subsamples says how much (a
control variate, where SHARDS-adj assumes all of it). How much the subsamples differ gives one part of the
bounds; the other is what they share, a stack whose distances are off by as much as its number of keys.

**Several caches.** Each stream of lookups has a cache of its own; curves of several can't be merged, so their
distances are counted into one. A cache that they share is asked last: it has credit for what they missed.

**Ghosts.** Keys that no cache holds any more are tracked all the same, up to the largest size asked for:
misses are samples, too.
"""

from lmcache.curves.curve import MissRatioCurve
from lmcache.curves.samples import HASHES, Kept, Lookup, Sampler, merged, threshold_of
from lmcache.curves.stack import RecencyStack
from lmcache.curves.window import Difference, Estimate, Window

__all__ = [
    "HASHES",
    "Difference",
    "Estimate",
    "Kept",
    "Lookup",
    "MissRatioCurve",
    "RecencyStack",
    "Sampler",
    "Window",
    "merged",
    "threshold_of",
]
