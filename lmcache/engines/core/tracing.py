"""Hooks for spans of requests, and the choice whether this process records any.

The scheduler side calls the hooks of a ``Tracer``. They do nothing unless the engine sends traces: then
``spans.SpanTracer`` implements them. OpenTelemetry is imported only then.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from lmcache.engines.core.jobs import LoadJob, StoreJob
    from lmcache.engines.core.requests import RequestState

logger = logging.getLogger(__name__)

OTHER_REQUEST: Final = "other_request"
"""Reason of a wait: another request of this engine computes the same rows."""

LOWER_TIERS: Final = "lower_tiers"
"""Reason of a wait: the sidecar has not answered yet, or promotes rows."""

ENGINE_MEMORY: Final = "engine_memory"
"""Reason of a wait: running loads need the engine's free blocks."""

_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


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


def make_tracer(endpoint: str | None = None, clock: Callable[[], float] = time.monotonic) -> Tracer:
    """Return hooks that record spans if this process sends traces, else ``NO_TRACER``. Never raises.

    Args:
        endpoint: OTLP endpoint in the engine's configuration; None: the one in the environment, if any.
        clock: the clock of the scheduler side, in seconds.
    """
    try:
        if not _is_wanted(endpoint):
            return NO_TRACER
        from lmcache.engines.core import spans

        return spans.make_tracer(endpoint, clock)
    except ImportError as error:
        hint = "install opentelemetry-sdk and opentelemetry-exporter-otlp"
        logger.warning("LMCache Cluster sends no spans: %s. To send them, %s", error, hint)
    except Exception as error:
        logger.warning("LMCache Cluster sends no spans: %s. Check the variables OTEL_*", error)
    return NO_TRACER


def _is_wanted(endpoint: str | None) -> bool:
    """Return True if spans have a destination. Does not import OpenTelemetry."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if endpoint or any(map(os.environ.get, _ENDPOINTS)):
        return True
    api = sys.modules.get("opentelemetry.trace")  # vLLM imports it in any case
    return api is not None and not isinstance(api.get_tracer_provider(), api.ProxyTracerProvider)
