"""The pages that the sidecar serves over HTTP, and what they show.

``http`` is the server, and ``tokens`` are the tokens that open it. ``stats`` and ``tenant_stats`` are
``/stats``, and ``metrics`` is ``/metrics``.
"""
