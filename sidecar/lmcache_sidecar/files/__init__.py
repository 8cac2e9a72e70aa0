"""Files and directories that the operator mounts, and that the sidecar re-reads while it runs.

``watched_files`` notices changes. The others read one file each: ``tenants`` (budgets), ``shards`` and
``peers`` (lists of servers), ``encryption_keys``.
"""
