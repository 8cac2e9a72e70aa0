"""The choice whether this process records spans of requests. Imports OpenTelemetry only if it does."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable

from lmcache_client.core.tracing import NO_TRACER, Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"


def make_tracer(endpoint: str | None = None, clock: Callable[[], float] = time.monotonic) -> Tracer:
    """Return hooks that record spans if this process sends traces, else ``NO_TRACER``. Never raises.

    Args:
        endpoint: OTLP endpoint in the engine's configuration; None: the one in the environment, if any.
        clock: the clock of the scheduler side, in seconds.
    """
    try:
        if not _is_wanted(endpoint):
            return NO_TRACER
        from lmcache_client.core import spans

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
