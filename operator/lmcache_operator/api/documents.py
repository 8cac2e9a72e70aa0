"""YAML as kubectl has it: what one of the two writes, the other reads as the same."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import yaml

_STRING, _TIMESTAMP, _VALUE = (f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value"))
_AMBIGUOUS = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?0[xXoObB][0-9a-fA-F_]+|[yYnN]"
)
"""Strings that Go's reader takes for numbers or booleans, Python's for strings: 1e3, 0o17."""


class _Loader(yaml.SafeLoader):
    """Without dates, which JSON, and so Kubernetes, has not, and without what else only YAML 1.1 has."""


class _WithoutColons(NamedTuple):
    pattern: re.Pattern[str]

    def match(self, text: str) -> re.Match[str] | None:
        """Numbers to the base 60, such as 1:30, are strings to kubectl."""
        return None if ":" in text else self.pattern.match(text)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _WithoutColons(pattern)) for tag, pattern in resolvers if tag not in (_TIMESTAMP, _VALUE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """With quotes where one of the two readers would take a string for something else."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar(_STRING, text, style=style)


_Dumper.add_representer(str, _string)


def load(text: str) -> list[Any]:
    """The documents of a file. Raises yaml.YAMLError."""
    return list(yaml.load_all(text, _Loader))


def dump(documents: list[dict[str, Any]]) -> str:
    """YAML for people and for ``kubectl apply``: documents with keys in the order they were put in."""
    # What is used twice would be written as an anchor and an alias; a copy is not used twice.
    unshared = json.loads(json.dumps(documents))
    return str(yaml.dump_all(unshared, Dumper=_Dumper, sort_keys=False, width=110))
