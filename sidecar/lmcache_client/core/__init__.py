"""Engine-neutral parts of all connectors: jobs, lookups, transfers, copiers. Imports no engine.

Scheduler side: ``scheduler``, with ``requests``, ``lookups``, ``hits``, ``wait_decisions``, ``waiting``,
``stores`` and ``events``. If a rank spans several nodes, ``parted_lookups`` and ``presence`` find the hits of
all parts. Worker side: ``worker``, with ``transfers``, and with copiers for host memory (``copier``) and GPUs
(``cuda_copier``). Both sides: ``grid`` (arithmetic of tokens, chunks and blocks), ``jobs`` (messages between
the sides), ``files`` (identity of the weights). Figures: ``times`` and ``timed_requests``, and spans in
``tracing`` (hooks that do nothing), ``tracer_choice`` and ``spans``. ``paged`` is for engines that load and
store whole pages.

Engines can rely on these promises:

- Hooks never raise, and each of their waits has a limit (``lmcache_store.common.timing``). A fault takes the
  connector offline, and the engine computes.
- The connector reports blocks as loaded only when their bytes are right.
- The engine gets its blocks back when no copy reads them any more, or at a deadline. A copy that ends after
  its deadline is never committed.
"""
