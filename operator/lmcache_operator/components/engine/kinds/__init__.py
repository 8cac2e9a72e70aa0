"""The kinds of engines. A new kind is a module here, and one entry in ``KINDS``."""

from __future__ import annotations

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds.base import EngineKind, words_of
from lmcache_operator.components.engine.kinds.sglang import SGLang
from lmcache_operator.components.engine.kinds.vllm import VLLM
from lmcache_operator.specs import Object

KINDS: tuple[EngineKind, ...] = (VLLM(), SGLang())
"""All kinds. Profiles list their additions to engines in this order."""
_DEFAULT = KINDS[0]
_BY_NAME = {kind.name: kind for kind in KINDS}


def kind_of(cluster: Cluster) -> EngineKind:
    """The kind of a cluster's engine. The cluster must have an engine."""
    return _BY_NAME[cluster.engine.kind]


def kind_in(container: Object) -> EngineKind | None:
    """The kind of engine that a container runs; None: another program.

    A container without a command runs the default kind, unless its arguments or its image say otherwise: an
    image of the user's own may have any name. The chart's MutatingAdmissionPolicy decides in the same way.
    """
    words, command = words_of(container), container.get("command")
    started = [kind for kind in KINDS if kind.launcher.search("\n".join(words))]
    if not started and not command:
        started = [kind for kind in KINDS if kind.has_image(container)]
    if started:
        return started[-1]
    is_named = any(_DEFAULT.name.lower() in word for word in words)
    return _DEFAULT if not command or is_named else None
