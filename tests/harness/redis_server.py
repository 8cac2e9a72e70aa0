"""See ``tools.processes``."""

from tools.processes import BINARY, RedisServer, free_port

__all__ = ["BINARY", "RedisServer", "free_port"]
