"""Logging of the library in programs that use it."""

from __future__ import annotations

import logging
import os

_FORMAT = "[%(asctime)s] LMCache %(levelname)s: %(message)s [%(name)s] -- %(filename)s:%(lineno)d"


def init_logger(name: str) -> logging.Logger:
    """Return the logger ``name``, which has its own handler and does not propagate to the root logger.

    The environment variable LMCACHE_LOG_LEVEL sets its level: the name of a level in any case, INFO by
    default. An invalid level counts as INFO and is logged as a warning, so that a typing error does not
    prevent an engine from starting. Further calls for the same name return the same logger.
    """
    logger = logging.getLogger(name)
    if logger.handlers:
        return logger
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    logger.addHandler(handler)
    logger.propagate = False
    level_name = os.environ.get("LMCACHE_LOG_LEVEL") or "INFO"
    level = logging.getLevelName(level_name.upper())
    logger.setLevel(level if isinstance(level, int) else logging.INFO)
    if not isinstance(level, int):
        logger.warning("LMCACHE_LOG_LEVEL=%r is not a log level; using INFO", level_name)
    return logger
