"""Loggers of the library: to standard error, apart from the application's own logging."""

from __future__ import annotations

import logging
import os

_FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s [%(name)s] -- %(filename)s:%(lineno)d"


def init_logger(name: str) -> logging.Logger:
    """Return the logger ``name`` with a handler of its own, not propagating to the root logger.

    Its level is LMCACHE_LOG_LEVEL (a level's name, any case), INFO when unset. An unknown name counts as INFO
    and is said in a warning: a typing error in an environment variable must not keep an engine from starting.
    Calling it again for the same name returns the same logger and adds nothing.
    """
    logger = logging.getLogger(name)
    if logger.handlers:
        return logger
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    wanted = os.environ.get("LMCACHE_LOG_LEVEL") or "INFO"
    level = logging.getLevelName(wanted.upper())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    if not isinstance(level, int):
        logger.warning("LMCACHE_LOG_LEVEL=%r is not a log level; taking INFO", wanted)
    return logger
