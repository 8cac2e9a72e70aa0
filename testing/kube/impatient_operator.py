"""``lmcache-operator run`` that looks at unsettled clusters after half a second, and not after five.

    python -m testing.kube.impatient_operator [--watch-seconds=N] run ...

With ``--watch-seconds``, it renews watches after N seconds, and not after ten minutes.
The operator learns by watches what changes in its objects. Answers of sidecars, Events of pods and evictions
that a budget refuses are seen only when it looks again. Everything else is the unchanged operator.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import kopf

from lmcache_operator.__main__ import main
from lmcache_store.common.backoff import Backoff

WAIT = Backoff(base=0.5, cap=4.0)


def run(argv: list[str]) -> int:
    os.environ.setdefault("HOME", "/")  # like lmcache_operator.__main__ before its imports
    from lmcache_operator import app
    from lmcache_operator.kube import refused_reads
    from lmcache_operator.reconcile import reconciler

    for module, name, value in ((reconciler, "_WAIT", WAIT), (refused_reads, "_BACKOFF", WAIT)):
        if not isinstance(getattr(module, name), Backoff):
            raise RuntimeError(f"{module.__name__} has no back-off of this kind: adapt this program")
        setattr(module, name, value)
    option, is_given, seconds = argv[0].partition("--watch-seconds=")
    if not option and is_given:
        make = app._kopf_settings

        def settings(*arguments: Sequence[str]) -> kopf.OperatorSettings:
            made = make(*arguments)
            made.watching.server_timeout = int(seconds)
            return made

        app._kopf_settings = settings  # type: ignore[assignment]
    return main(argv[bool(is_given) :])


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
