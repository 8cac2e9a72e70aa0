"""Injection of the cache into users' own pods, such as those of existing Deployments."""
