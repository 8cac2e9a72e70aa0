"""The commands of ``kubectl lmcache``. They read a cluster and change nothing in it.

``commands`` has a module for each command, and ``completion`` completes what a user types. The words that the
sidecar's own command prints, too, are in ``lmcache_store.explain``.
"""
