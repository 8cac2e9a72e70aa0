"""Helpers that every part may use and that do not depend on the cache."""
