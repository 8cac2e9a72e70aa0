"""Explains where prompt tokens came from, and why the others were computed: words and advice. Pure.

The sidecar counts tokens by cause (``causes`` of ``/stats``); its command and ``kubectl lmcache`` print
them. ``merge`` adds up several sidecars. ``findings`` is the advice, ``sizes`` the hits of larger tiers,
``benefit`` what the cache saves, and ``tenants`` the same by tenant. ``traffic`` and ``live`` are
for ``top``. ``tables`` prints causes.
"""
