"""Errors of the connectors: why an engine, or a part of its KV, is not cached.

::

    EngineError
    ├── UnsupportedError   the cache does not support this engine: the engine runs without the cache
    └── UnnamedError       the weights or a LoRA adapter can't be identified by the content of their files

The connector catches both errors and logs the reason. After an UnnamedError for the weights, the engine uses
the cache, but does not share its KV with other engines. After one for an adapter, the cache skips the
adapter's requests.
"""

import time


class EngineError(Exception):
    """Base of all errors of the connectors. The message gives the reason, for a log line."""


class UnsupportedError(EngineError):
    """The engine can't be cached and runs without the cache. The message is a sentence with the reason."""


class UnnamedError(EngineError):
    """Weights or an adapter can't be identified by their files. The message is a clause with the reason."""


def private_until_restart(event: str) -> str:
    """Return why other engines can't know whose KV this is, after an event that may change the weights."""
    return (
        f"{event} at {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC: private until the engine restarts"
    )
