"""Hooks for spans of requests.

The scheduler side calls the hooks of a ``Tracer``. They do nothing unless the engine sends traces: then
``spans.SpanTracer`` implements them (``tracer_choice``).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lmcache_client.core.jobs import LoadJob, StoreJob
    from lmcache_client.core.requests import RequestState

OTHER_REQUEST: Final = "other_request"
"""Reason of a wait: another request of this engine computes the same rows."""

LOWER_TIERS: Final = "lower_tiers"
"""Reason of a wait: the sidecar has not answered yet, or promotes rows."""

ENGINE_MEMORY: Final = "engine_memory"
"""Reason of a wait: running loads need the engine's free blocks."""


class Tracer:
    """Hooks that record nothing. No hook blocks or raises."""

    def begin(self, state: RequestState) -> None:
        """Begin the lookup of a request that arrived, or that starts again."""

    def hold(self, request_id: str, reason: str) -> None:
        """Record that the connector holds the request back in this step."""

    def resume(self, request_id: str) -> None:
        """Record that the connector does not hold the request back in this step."""

    def end_lookup(self, request_id: str, num_loaded_tokens: int) -> None:
        """Record that the engine allocated blocks for the request, to load this many tokens."""

    def begin_load(self, job: LoadJob, num_tokens: int) -> None:
        """Record that the workers receive the load with this step."""

    def end_load(self, request_id: str) -> None:
        """Record that the request's load ended on all ranks."""

    def begin_stores(self, request_id: str, jobs: Iterable[StoreJob]) -> None:
        """Record that the workers receive these stores with this step."""

    def end_store(self, job_id: int) -> None:
        """Record that a store ended on all ranks."""

    def finish(self, request_id: str) -> None:
        """Forget a finished request when its load has ended. Its stores may still run."""

    def clear(self) -> None:
        """Forget all requests and stores."""


NO_TRACER: Final = Tracer()
"""The hooks of a process without traces."""
