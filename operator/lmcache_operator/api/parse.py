"""The parser: from a user's object to typed values, or to an error that names the field.

The API server has already checked most rules. The parser checks them again, because ``lmcache-operator
render`` has no API server, and because an object may be older than the CRD.
"""

from __future__ import annotations

import dataclasses
import re
import reprlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmcache_operator.api import GROUP, KIND
from lmcache_operator.api.engine_kinds import ENGINE_KINDS, VLLM
from lmcache_operator.api.fields import Field, Part, Rule, is_part
from lmcache_operator.api.keywords import CLUSTER_NAME, CLUSTER_NAME_PATTERN, NAMING
from lmcache_operator.api.router import CACHE_AWARE, KV_AWARE
from lmcache_operator.api.tiers import MemoryTierSpec
from lmcache_operator.api.types import EngineSpec, Model, Spec
from lmcache_operator.errors import InvalidSpecError
from lmcache_store.common.options import suggestion

# More than any pod template needs, and far less than the limit of recursion.
_MAX_LEVELS = 32
TYPE_NAMES = {str: "a string", int: "an integer", bool: "a boolean", list: "a list", dict: "an object"}
_KEYWORDS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "pattern": (lambda value, pattern: re.fullmatch(pattern, value), "{value!r} does not match {limit}"),
    "minimum": (lambda value, limit: value >= limit, "must be at least {limit}, not {value}"),
    "maximum": (lambda value, limit: value <= limit, "must be at most {limit}, not {value}"),
    "multipleOf": (lambda value, unit: value % unit == 0, "must be a multiple of {limit}, not {value}"),
    "maxLength": (lambda value, limit: len(value) <= limit, "is too long: more than {limit} characters"),
    "enum": (lambda value, known: value in known, "must be one of {limit}, not {value!r}"),
    "maxItems": (lambda value, limit: len(value) <= limit, "is too long: more than {limit} items"),
}
"""OpenAPI keywords that restrict a value, each with its check and its error message."""


class Sizes(NamedTuple):
    """Sizes that the operator chose instead of the declared ones; None: no choice."""

    memory_bytes: int | None = None
    """Bytes of each pod's memory tier."""
    shards: int | None = None


class Lender(NamedTuple):
    """Another LMCacheCluster whose tier this one uses. Names of Secrets follow from it."""

    uid: str
    certificate: str = ""
    """Secret that its spec names for the certificate of its shards; empty: none."""


class Platform(NamedTuple):
    """Properties of the Kubernetes cluster that shape pods."""

    assigns_ids: bool = False
    """Whether it gives each pod its user and groups, as OpenShift does."""
    host: str = "0.0.0.0"
    """Address on which servers listen, in all families in which pods have addresses."""
    primary_host: str = "0.0.0.0"
    """The same, only in the family of a pod's primary address, to which the kubelet sends its probes."""


AS_DECLARED = Sizes()
EVENTS_FOR = f"{GROUP}/events-for"
"""Annotation of an LMCacheCluster whose pods only compute prompts: name of the cluster whose router reads the
KV events of its engines. It counts only on a cluster whose controller is the named one."""


@dataclass(frozen=True)
class Cluster:
    """An LMCacheCluster with a valid name and spec."""

    namespace: str
    name: str
    uid: str
    spec: Spec
    prefills_for: str = ""
    """Name of the cluster whose router reads the KV events of these pods, which only compute prompts; empty:
    none."""
    chosen: Sizes = AS_DECLARED
    default_images: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Default images that the StatefulSet of the engine pods records, by container; empty: no record."""
    lenders: Mapping[str, Lender] = dataclasses.field(default_factory=dict)
    """Clusters whose tiers this one uses, by name. One that has never existed is missing."""
    platform: Platform = dataclasses.field(default_factory=Platform)

    @property
    def memory_bytes(self) -> int:
        """Bytes of each pod's memory tier, chosen or declared."""
        return self.chosen.memory_bytes or self.memory.num_bytes

    @property
    def num_shards(self) -> int:
        """Number of shards, chosen or declared; 0: no managed remote tier."""
        managed = self.spec.tiers.managed
        return (self.chosen.shards or managed.shards) if managed else 0

    @property
    def events_reader(self) -> str:
        """Name of the cluster whose router reads the engines' KV events; empty: they publish none.

        Events contain the salts of requests, so engines with tenants never publish them.
        """
        router, engine = self.spec.router, self.spec.engine
        if self.spec.tenants is not None:
            return ""
        if router is not None and router.policy == KV_AWARE:
            return self.name
        has_events = engine is not None and ENGINE_KINDS[engine.kind].publishes_events
        return self.prefills_for if has_events else ""

    @property
    def tokenizes_for_router(self) -> bool:
        """Whether the router remembers prompts, and asks the engines for the tokens of those of text."""
        router = self.spec.router
        return router is not None and router.policy == CACHE_AWARE and self.engine.kind == VLLM.name

    @property
    def engine(self) -> EngineSpec:
        """Spec of the engine. The cluster must have one."""
        assert self.spec.engine is not None
        return self.spec.engine

    @property
    def num_parts(self) -> int:
        """Pods that a data-parallel rank spans, each with a part of the KV. Only the first has a server."""
        return self.engine.nodes if self.engine.parallelism.data < self.engine.nodes else 1

    @property
    def model(self) -> Model:
        """The model that the engine serves. The cluster must have an engine."""
        assert self.spec.model is not None
        return self.spec.model

    @property
    def memory(self) -> MemoryTierSpec:
        """Spec of the memory tier. The cluster must have an engine."""
        assert self.spec.tiers.memory is not None
        return self.spec.tiers.memory


def parse(resource: Mapping[str, Any]) -> Cluster:
    """Parse an LMCacheCluster.

    Raises:
        InvalidSpecError: its name or spec is invalid.
    """
    metadata = _parse_value(dict, resource.get("metadata"), "metadata")
    name = _parse_value(str, metadata.get("name"), "metadata.name")
    _check_rules((CLUSTER_NAME,), name, "metadata.name")
    cluster = Cluster(
        namespace=metadata.get("namespace", "default"),
        name=name,
        uid=metadata.get("uid", ""),
        spec=_parse_value(Spec, resource.get("spec"), "spec"),
        prefills_for=_events_reader(metadata),
    )
    _check_rules(NAMING, cluster, "metadata.name")
    return cluster


def _events_reader(metadata: dict[str, Any]) -> str:
    annotations, owners = metadata.get("annotations"), metadata.get("ownerReferences")
    name = annotations.get(EVENTS_FOR) if isinstance(annotations, dict) else None
    if not isinstance(name, str) or not re.fullmatch(CLUSTER_NAME_PATTERN, name):
        return ""
    controller = {"kind": KIND, "name": name, "controller": True}
    listed = [each for each in owners if isinstance(each, dict)] if isinstance(owners, list) else []
    return name if any(controller.items() <= each.items() for each in listed) else ""


def _parse_value(annotation: Any, raw: Any, path: str) -> Any:
    expected = dict if is_part(annotation) else typing.get_origin(annotation) or annotation
    # bool is an int in Python, but not in YAML.
    if not isinstance(raw, expected) or isinstance(raw, bool) != (expected is bool):
        raise InvalidSpecError(path, f"must be {TYPE_NAMES[expected]}, not {reprlib.repr(raw)}")
    if is_part(annotation):
        return _parse_object(annotation, raw, path)
    if expected is list:
        (item,) = typing.get_args(annotation)
        return [_parse_value(item, value, f"{path}[{index}]") for index, value in enumerate(raw)]
    if expected is dict:
        _check_depth(raw, path)
    return raw


def _check_depth(raw: Any, path: str) -> None:
    """Refuse nesting that exceeds the recursion limit. The CRD refuses it too, but ``render`` has no CRD."""
    level = [raw]
    for _ in range(_MAX_LEVELS):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
    if level:
        raise InvalidSpecError(path, f"is nested more than {_MAX_LEVELS} levels deep")


def _parse_object(cls: Any, raw: dict[str, Any], path: str) -> Any:
    fields = cls.FIELDS
    known = {field.json_name for field in fields}
    if unknown := sorted(map(str, raw.keys() - known)):
        hint = suggestion(unknown[0], known)
        raise InvalidSpecError(f"{path}.{unknown[0]}", f"is not a known field{hint}")
    parsed = cls(**{field.name: _parse_field(field, raw, path) for field in fields})
    _check_rules(cls.RULES, parsed, path)
    return parsed


def _parse_field(field: Field, part: dict[str, Any], path: str) -> Any:
    raw, path = part.get(field.json_name), f"{path}.{field.json_name}"
    raw = field.default if raw is None else raw
    if raw is None:
        if field.is_required:
            raise InvalidSpecError(path, "is required")
        return None
    value = _parse_value(field.type, raw, path)
    _check_keywords(field.keywords, value, path)
    _check_rules(field.rules, value, path)
    return value


def _check_keywords(keywords: Mapping[str, Any], value: Any, path: str) -> None:
    for keyword, (holds, sentence) in _KEYWORDS.items():
        if keyword in keywords and not holds(value, keywords[keyword]):
            raise InvalidSpecError(path, sentence.format(value=value, limit=keywords[keyword]))
    for index, item in enumerate(value if "items" in keywords else ()):
        _check_keywords(keywords["items"], item, f"{path}[{index}]")


def _check_rules(rules: tuple[Rule, ...], value: Any, path: str) -> None:
    for rule in rules:
        if not rule.holds(value):
            raise InvalidSpecError(path, rule.message)


def written(value: Part) -> dict[str, Any]:
    """Return the fields of a parsed object that differ from their defaults, as a user writes them."""
    fields = ((field, _written(getattr(value, field.name))) for field in value.FIELDS)
    return {field.json_name: item for field, item in fields if item is not None and item != field.default}


def _written(item: Any) -> Any:
    if isinstance(item, list):
        return [_written(each) for each in item]
    return written(item) if isinstance(item, Part) else item


def declared(value: Part) -> dict[str, Any]:
    """Return the fields of a parsed object that differ from their defaults, by their Python names.

    Defaults are left out, so that a field that a later version adds does not change the result.
    """
    fields: dict[str, Any] = {}
    for field in value.FIELDS:
        current = getattr(value, field.name)
        if isinstance(current, Part):
            current = declared(current) or None
        if current is not None and current != field.default:
            fields[field.name] = current
    return fields
