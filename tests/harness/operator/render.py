"""Rendered children of LMCacheClusters, and the parts of their pods."""

from collections.abc import Iterator
from typing import Any

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.contract.base import Component, Context
from lmcache_operator.specs.kinds import Ref, ref_of
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.model import Object, cluster

CONTEXT = Context(STOCK_IMAGES)
ENGINES = Ref("StatefulSet", "demo-engine")


def render(resource: Object, *components: Component, context: Context = CONTEXT) -> dict[Ref, Object]:
    """Children of a cluster in their order. Without components: those of its engines."""
    parsed = parse(resource)
    rendered = [child for each in components or (Engine(),) for child in each.render(parsed, context)]
    return {ref_of(child): child for child in rendered}


def children(*components: Component, context: Context = CONTEXT, **changes: Any) -> dict[Ref, Object]:
    """Children of a cluster whose spec has ``changes``."""
    return render(cluster(**changes), *components, context=context)


def child_of(kind: str, *components: Component, context: Context = CONTEXT, **changes: Any) -> Object:
    """The only child of this kind."""
    rendered = children(*components, context=context, **changes)
    (child,) = [each for ref, each in rendered.items() if ref.kind == kind]
    return child


def template_of(context: Context = CONTEXT, **changes: Any) -> Object:
    """Template of the engine pods, or of those of the first engine if each is a group of pods."""
    rendered = children(context=context, **changes)
    template: Object = next(rendered[ref] for ref in rendered if ref.kind == "StatefulSet")["spec"][
        "template"
    ]
    return template


def pod_of(context: Context = CONTEXT, **changes: Any) -> Object:
    """Spec of the engine pods."""
    spec: Object = template_of(context, **changes)["spec"]
    return spec


def part(items: list[Object], name: str) -> Object:
    """The item of this name."""
    (item,) = [each for each in items if each["name"] == name]
    return item


def container(spec: Object, name: str) -> Object:
    """A container or init container of a pod."""
    return part([*spec.get("initContainers", ()), *spec["containers"]], name)


def env_of(container: Object) -> dict[str, Any]:
    """Variables of a container. The value of a reference is None."""
    return {item["name"]: item.get("value") for item in container["env"]}


def secrets_in(value: Any) -> Iterator[Object]:
    """Sources of volumes with a Secret, and specs of Certificates, whose Secret cert-manager writes."""
    if isinstance(value, list):
        for item in value:
            yield from secrets_in(item)
    elif isinstance(value, dict):
        if "issuerRef" in value and "secretName" in value:
            yield value
        for key, item in value.items():
            if key == "secret":
                yield item
            yield from secrets_in(item)
