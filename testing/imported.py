"""Modules of a sidecar. A ``ForkServer`` imports them before the first copy."""

import gc

import lmcache_sidecar.command
import lmcache_sidecar.daemon
import lmcache_sidecar.pages.metrics  # noqa: F401

gc.collect()
gc.freeze()  # a collection in a copy would write to all pages and so copy them
