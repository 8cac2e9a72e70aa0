"""Plans for in-memory LMCacheClusters: observations, and the effects of a plan."""

import asyncio
from datetime import UTC, datetime
from typing import Any

from hypothesis import strategies as st

from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.contract.base import Context, Observed, Plan
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.reconcile import plan as planning
from lmcache_operator.reconcile.status import derive_status
from lmcache_operator.specs import Images
from lmcache_operator.specs.kinds import BY_NAME, SECRET, Ref, ref_of
from lmcache_operator.specs.names import STOCK_IMAGES as IMAGES
from tests.harness.operator.model import World, cluster

STATEFUL_SET = Ref("StatefulSet", "demo-engine")


EARLY, LATE = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)


ENGINE = Engine()


def observe(world: World, **more: Any) -> Observed:
    return Observed(**{
        "resource": world.resource, "pods": tuple(world.pods.values()),
        "children": {ref: child for ref, child in world.objects.items() if ref.kind != "Secret"},
        "warnings": tuple(world.warnings), "now": EARLY,
    } | more)  # fmt: skip


def plan(observed: Observed, images: Images) -> Plan:
    """The plan for the engine component."""
    plans, fault = planning.plan([ENGINE], observed.resource, {ENGINE.name: observed}, Context(images))
    assert fault is None
    return plans[ENGINE.name]


def carry_out(world: World, due: Plan, *, is_ready: bool = True) -> None:
    async def run() -> None:
        for secret in due.make:
            await world.create(SECRET, secret)
        for wanted in due.apply:
            live = world.objects.get(ref_of(wanted))
            await world.apply(wanted, live and live["metadata"]["uid"])
        for ref in due.delete:
            uid = world.objects[ref]["metadata"]["uid"]
            await world.delete(BY_NAME[ref.kind], "", ref.name, uid)
        for pod in due.evict:
            await world.evict("", pod["metadata"]["name"], pod["metadata"]["uid"])

    asyncio.run(run())
    world.run_stateful_sets(is_ready=is_ready)


def status_of(world: World, failures: tuple[Problem, ...] = (), **more: Any) -> dict[str, Any]:
    """The status of the world as it is."""
    observed = observe(world, **more)
    due = plan(observed, IMAGES)
    statuses = [ENGINE.status(observed, due)]
    return derive_status(observed.resource, observed.now, statuses, {ENGINE.name: due}, failures)


def settled_world(**changes: Any) -> World:
    world = World(cluster(**changes))
    carry_out(world, plan(observe(world), IMAGES))
    return world


def outdated_world(**changes: Any) -> World:
    """Three ready pods of an earlier spec, under a template of the current spec."""
    world = settled_world(engine={"replicas": 3})
    world.change(engine={"args": ["--new"]}, **changes)
    due = plan(observe(world), IMAGES)
    assert not due.evict, "the template must be written first"
    carry_out(world, due)
    return world


def _object(optional: dict[str, Any], **required: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(required, optional=optional)


_GPUS = [{"count": 0}, {"runtimeClassName": "nvidia"}, {"deviceClassName": "gpu.nvidia.com"}]
_TRANSFER = {"transfer": st.sampled_from(["Auto", "SharedMemory"])}
_TENANTS: list[dict[str, Any]] = [
    {},
    {"header": True},
    {"default": {"memoryPercent": 30}},
    {"named": [{"name": "search", "saltSecretRef": {"name": "salt"}, "priority": 1}]},
]
_ENGINE = {
    "args": st.lists(st.sampled_from(["--a=1", "--b"]), max_size=2),
    "image": st.sampled_from(["e:1", "e:2"]),
    "gpu": st.sampled_from(_GPUS),
}
_TIERS = {
    "peers": st.sampled_from([{}, {"bytesPerSecond": "1Gi"}]),
    "remote": st.just({"external": {"url": "redis://h:1"}}),
}
specs = _object(
    {
        "engine": st.builds(
            lambda engine, nodes, split: (
                engine | ({"nodes": nodes, "parallelism": {split: nodes}} if nodes > 1 else {})
            ),
            _object(_ENGINE, replicas=st.integers(0, 3)),
            st.sampled_from([1, 1, 2, 3]),
            st.sampled_from(["data", "tensor"]),
        ),
        "sidecar": _object(_TRANSFER, chunkTokens=st.sampled_from([64, 256])),
        "tenants": st.sampled_from(_TENANTS),
        "tiers": _object(_TIERS, memory=_object({}, size=st.sampled_from(["1Gi", "1024Mi", "3Gi"]))),
    }
)
