"""Miss-ratio curves: they estimate the hit ratio of an LRU cache of any size from samples of accesses. Pure.

The method is fixed-size SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST '15). It
tracks only keys whose hash is below a threshold, and computes their exact stack distances in bytes. A
distance divided by the sampling rate estimates the distance among all keys. If too many keys are tracked, the
threshold is lowered, and the keys above it are forgotten. Memory and time are therefore bounded under any
load.

**Whole requests.** A cache looks up all keys of a prompt before it stores any, so a long prompt does not
evict its own chunks. Keys are given tail first, in the order in which the tiers touch them. The distance of a
chunk is thus never smaller than that of the chunks it depends on, and a hit of the curve is a hit of a whole
prefix.

**Hot keys.** Whether the first chunk of a system prompt is sampled decides about a large share of all
accesses. Sampling alone would therefore be wrong by percentage points. So samplers record the head of every
chain, regardless of its hash. The few keys that turn out to be hot (Misra-Gries) are tracked separately, with
weight 1.

**Known total.** The total number of accesses is known (``count_accesses``) and differs from the estimate of
the sampling. The error of the total indicates the error of the hits. A regression over 16 independent
subsamples says how strongly (a control variate; SHARDS-adj assumes that the errors are equal). The error
bounds have two parts. One is the difference between the subsamples. The other is common to all subsamples:
the distances in their stack are as inaccurate as its number of keys.

**Several caches.** Each stream of lookups has its own cache. Curves of several caches can't be merged, so
their distances are counted in one curve. A shared cache is looked up last: only hits that the streams' own
caches missed count for it.

**Ghosts.** Keys that no cache holds any more are still tracked, up to the largest size of the curve, because
misses are samples, too.
"""

from lmcache_store.curves.curve import MissRatioCurve
from lmcache_store.curves.samples import HASHES, Lookup, SampledRequest, Sampler, threshold_of
from lmcache_store.curves.stack import RecencyStack
from lmcache_store.curves.window import Difference, Estimate, Window

__all__ = [
    "HASHES",
    "Difference",
    "Estimate",
    "Lookup",
    "MissRatioCurve",
    "RecencyStack",
    "SampledRequest",
    "Sampler",
    "Window",
    "threshold_of",
]
