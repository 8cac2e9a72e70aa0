"""YAML for people and for ``kubectl apply``."""

from __future__ import annotations

import json
from typing import Any

import yaml


def dump(documents: list[dict[str, Any]]) -> str:
    """One or more documents, keys in the order they were put in."""
    # What is used twice would be written as an anchor and an alias; a copy is not used twice.
    unshared = json.loads(json.dumps(documents))
    return str(yaml.safe_dump_all(unshared, sort_keys=False, width=110))
