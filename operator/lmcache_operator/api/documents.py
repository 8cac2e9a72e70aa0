"""YAML with kubectl's rules, so that kubectl and Python read the same values."""

from __future__ import annotations

import json
import re
from itertools import chain
from typing import Any, NamedTuple

import yaml

_STRING, _TIMESTAMP, _VALUE = (f"tag:yaml.org,2002:{name}" for name in ("str", "timestamp", "value"))
_AMBIGUOUS = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?0[xXoObB][0-9a-fA-F_]+|[yYnN]"
)
"""Strings that Go's parser reads as numbers or booleans and Python's as strings, such as 1e3 and 0o17."""


_MAX_REPEATED = 1 << 20
"""Characters and values that the aliases of a document may repeat. Without a limit, a few hundred bytes with
aliases of aliases take all memory. An object of Kubernetes has at most 1.5 MiB.
"""


class _Loader(yaml.SafeLoader):
    """Loader without dates and other types of YAML 1.1 that JSON, and so Kubernetes, lacks.

    It counts what aliases repeat before it creates any value, because a merge key copies what it repeats.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._sizes: dict[yaml.Node, int] = {}
        self._num_repeated = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node:
        """Compose a node of the document, or find the node that an alias repeats. Raises yaml.YAMLError."""
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        if is_alias:
            # A value that contains itself has no size yet.
            self._num_repeated += self._sizes.get(node, _MAX_REPEATED + 1)
            if self._num_repeated > _MAX_REPEATED:
                problem = "aliases repeat too many values, or the value that contains them"
                raise yaml.composer.ComposerError(None, None, problem, node.start_mark)
        else:
            self._sizes[node] = self._size(node)
        return node

    def _size(self, node: yaml.Node) -> int:
        if isinstance(node, yaml.ScalarNode):
            return 1 + len(node.value)
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        return 1 + sum(self._sizes[part] for part in parts)


class _WithoutColons(NamedTuple):
    pattern: re.Pattern[str]

    def match(self, text: str) -> re.Match[str] | None:
        """Match like the pattern, but not numbers to base 60 such as 1:30: kubectl reads them as strings."""
        return None if ":" in text else self.pattern.match(text)


_Loader.yaml_implicit_resolvers = {
    first: [(tag, _WithoutColons(pattern)) for tag, pattern in resolvers if tag not in (_TIMESTAMP, _VALUE)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Dumper that quotes strings which one of the two parsers would not read as strings."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "'" if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar(_STRING, text, style=style)


_Dumper.add_representer(str, _string)


def load(text: str) -> list[Any]:
    """Parse the documents of a file. Raises yaml.YAMLError."""
    return list(yaml.load_all(text, _Loader))


def dump(documents: list[dict[str, Any]]) -> str:
    """Return YAML for users and for ``kubectl apply``. Keys keep their order."""
    # PyYAML writes an object that occurs twice as an anchor and an alias. The copy has no shared objects.
    unshared = json.loads(json.dumps(documents))
    return str(yaml.dump_all(unshared, Dumper=_Dumper, sort_keys=False, width=110))
