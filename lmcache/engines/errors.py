"""The connectors' errors: why an engine, or a part of what it computes, is not cached.

::

    EngineError
    ├── UnsupportedError   this engine is not cached at all
    └── UnnamedError       files that can't be told from others: no KV of theirs is shared

Neither reaches the engine: it runs untouched.
"""


class EngineError(Exception):
    """Base of all errors of the connectors; the message says why, for a log line."""


class UnsupportedError(EngineError):
    """This engine runs untouched, nothing is offered; the message is a sentence that says why."""


class UnnamedError(EngineError):
    """The files can't be told from others; the message says why, as the end of a sentence."""
