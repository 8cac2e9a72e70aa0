"""The kinds of engines: vLLM and SGLang."""

from __future__ import annotations

from lmcache_operator.api.parse import Cluster
from lmcache_operator.components.engine.kinds.base import EngineKind, words_of
from lmcache_operator.components.engine.kinds.sglang import SGLang
from lmcache_operator.components.engine.kinds.vllm import VLLM
from lmcache_operator.specs import Object

KINDS: tuple[EngineKind, ...] = (VLLM(), SGLang())
"""All kinds. Profiles list their additions to engines in this order."""
_VLLM, _SGLANG = KINDS
_BY_NAME = {kind.name: kind for kind in KINDS}


def kind_of(cluster: Cluster) -> EngineKind:
    """The kind of a cluster's engine. The cluster must have an engine."""
    return _BY_NAME[cluster.engine.kind]


def kind_in(container: Object) -> EngineKind | None:
    """The kind of engine that a container runs; None: another program.

    A container without a command runs vLLM, unless its arguments or its image say otherwise: an image of the
    user's own may have any name. The chart's MutatingAdmissionPolicy decides in the same way.
    """
    words, command = words_of(container), container.get("command")
    text = "\n".join(words)
    if _SGLANG.launcher.search(text):
        return _SGLANG
    if not command and _SGLANG.has_image(container) and not _VLLM.launcher.search(text):
        return _SGLANG
    return _VLLM if not command or any("vllm" in word for word in words) else None
