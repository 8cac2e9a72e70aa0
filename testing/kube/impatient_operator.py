"""``lmcache-operator run`` that looks at unsettled clusters after half a second, and not after five.

    python -m testing.kube.impatient_operator run ...

The operator learns by watches what changes in its objects. Answers of sidecars, Events of pods and evictions
that a budget refuses are seen only when it looks again. Everything else is the unchanged operator.
"""

from __future__ import annotations

import os
import sys

from lmcache_operator.__main__ import main
from lmcache_store.common.backoff import Backoff

WAIT = Backoff(base=0.5, cap=4.0)


def run(argv: list[str]) -> int:
    os.environ.setdefault("HOME", "/")  # like lmcache_operator.__main__ before its imports
    from lmcache_operator.reconcile import reconciler

    if not isinstance(reconciler._WAIT, Backoff):
        raise RuntimeError(f"{reconciler.__name__} has no back-off of this kind: adapt this program")
    reconciler._WAIT = WAIT
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
