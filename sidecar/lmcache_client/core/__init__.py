"""Engine-neutral parts of all connectors: jobs, lookups, transfers, copiers. Imports no engine.

Scheduler side: ``scheduler``, with ``requests``, ``lookups``, ``hits``, ``wait_decisions``, ``waiting``,
``stores`` and ``events``. Worker side: ``worker``, with ``transfers``, and with copiers for host memory
(``copier``) and GPUs (``cuda_copier``). Both sides: ``grid`` (arithmetic of tokens, chunks and blocks),
``jobs`` (messages between the sides), ``files`` (identity of the weights). Figures: ``times`` and
``timed_requests``, and spans in ``tracing`` (hooks that do nothing), ``tracer_choice`` and ``spans``.
"""
