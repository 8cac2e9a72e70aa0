"""YAML for people and for `kubectl apply`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Without anchors, so that every part can be read by itself."""

    def ignore_aliases(self, data: object) -> bool:
        """Write a value again where it is used again."""
        return True


def dump(documents: Iterable[Any]) -> str:
    """One or more documents, keys in the order they were put in."""
    text: str = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=110)
    return text
