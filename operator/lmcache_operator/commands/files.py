"""Files that a command reads or writes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from lmcache_operator.api.documents import load
from lmcache_operator.errors import FileError, InvalidSpecError


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """Convert errors in the context to `FileError` with the file's name. A FileError passes unchanged."""
    try:
        yield
    except RecursionError as error:
        raise FileError(f"{path}: is nested too deeply") from error
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, InvalidSpecError) as error:
        raise FileError(f"{path}: {error}") from error


def read_objects(path: Path) -> list[Any]:
    """Read all YAML documents of a file; "-" is standard input."""
    return load(sys.stdin.read() if str(path) == "-" else path.read_text())
