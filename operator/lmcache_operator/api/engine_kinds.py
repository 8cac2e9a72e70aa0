"""The kinds of engines in the API: their names, versions and default images, and what each cannot do.

A new kind is an entry in ``ENGINE_KINDS``, and a module in ``components/engine/kinds``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from lmcache_operator.api.blend import is_off, is_off_in_cel
from lmcache_operator.api.fields import Rule
from lmcache_operator.api.router import KV_AWARE

CHUNK_TOKENS = 256
"""Default of sidecar.chunkTokens."""


class EngineApi(NamedTuple):
    """One kind of engine, as the API knows it."""

    name: str
    """Value of ``spec.engine.kind``, and the name of the engine in messages."""
    versions: str
    """Supported version, or the oldest and the newest one with a hyphen between them."""
    image: str
    """Default image of the engine's container."""
    image_flag: str
    """Flag of the operator that sets another default image, without its ending ``-image``."""
    publishes_events: bool = False
    """Whether engines publish KV events, which routers read."""
    limits: tuple[tuple[str, str, Callable[[Any], bool]], ...] = ()
    """Checks of a spec whose engine is of this kind: CEL, message, and the same check of the parsed spec."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The limits as rules of any spec."""
        return tuple(self._rule(*limit) for limit in self.limits)

    def _rule(self, cel: str, message: str, holds: Callable[[Any], bool]) -> Rule:
        def check(spec: Any) -> bool:
            return spec.engine is None or spec.engine.kind != self.name or holds(spec)

        return Rule(f"!has(self.engine) || self.engine.kind != '{self.name}' || {cel}", message, check)


VLLM = EngineApi("vLLM", "0.29-0.33", "vllm/vllm-openai:v0.32.0", "engine", publishes_events=True)
SGLANG = EngineApi(
    "SGLang",
    "0.5.23",
    "lmsysorg/sglang:v0.5.23",
    "sglang",
    limits=(
        (
            "self.sidecar.transfer != 'CudaIPC'",
            "SGLang copies its KV itself: set sidecar.transfer to Auto or SharedMemory",
            lambda spec: spec.sidecar.transfer != "CudaIPC",
        ),
        (
            f"self.sidecar.chunkTokens == {CHUNK_TOKENS}",
            "sidecar.chunkTokens is for vLLM only: leave it out, and set --page-size in engine.args",
            lambda spec: spec.sidecar.chunk_tokens == CHUNK_TOKENS,
        ),
        (
            f"!has(self.router) || self.router.policy != '{KV_AWARE}'",
            "SGLang reports no KV events about the sidecar: set router.policy to CacheAware",
            lambda spec: spec.router is None or spec.router.policy != KV_AWARE,
        ),
        (
            "!has(self.engine.prefill)",
            "engine.prefill needs engine.kind vLLM",
            lambda spec: spec.engine.prefill is None,
        ),
        (
            "!self.engine.parallelism.expert",
            "engine.parallelism.expert needs engine.kind vLLM: set --ep-size in engine.args instead",
            lambda spec: not spec.engine.parallelism.expert,
        ),
        (
            "self.engine.nodes == 1",
            "engine.nodes needs engine.kind vLLM for now: set engine.replicas for more engines",
            lambda spec: spec.engine.nodes == 1,
        ),
        (
            is_off_in_cel("self.engine"),
            "engine.blend needs engine.kind vLLM for now: leave it out",
            lambda spec: is_off(spec.engine.blend),
        ),
        (
            "!self.engine.hintsRoute",
            "engine.hintsRoute needs engine.kind vLLM: leave it out",
            lambda spec: not spec.engine.hints_route,
        ),
        (
            "!has(self.tenants) || !self.tenants.header",
            "tenants.header needs engine.kind vLLM: leave it out, and let the gateway set cache_salt instead",
            lambda spec: spec.tenants is None or not spec.tenants.header,
        ),
    ),
)
ENGINE_KINDS = {kind.name: kind for kind in (VLLM, SGLANG)}
"""All kinds by name. The first is the default."""
ANY_ENGINE = " or ".join(ENGINE_KINDS)
"""The names of all kinds, for messages."""
VERSIONS = " or ".join(f"{kind.name} {kind.versions}" for kind in ENGINE_KINDS.values())
"""The same with the supported versions."""
