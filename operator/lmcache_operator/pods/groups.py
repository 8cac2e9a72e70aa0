"""Groups of pods that serve only together, and the pods to replace next. Pure.

A group is an engine over several nodes, with a StatefulSet of its own, or a single pod. If one pod of a group
ends, the launchers end vLLM in the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lmcache_operator.contract.base import Observed
from lmcache_operator.pods.pods import is_outdated, is_ready, is_unseen, pods_by_owner
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_operator.specs.names import group_number


class Group(NamedTuple):
    """Pods that serve only together."""

    number: int | None
    """Number of an engine over several nodes; None: a single pod."""
    owner: Object
    """The StatefulSet."""
    size: int
    """Number of pods that the StatefulSet creates; 0: the engine is being removed."""
    pods: tuple[Object, ...]

    @property
    def is_ready(self) -> bool:
        """Whether the group serves."""
        return 0 < self.size <= len(self.pods) and all(map(is_ready, self.pods))


def staying(pods: Iterable[Object]) -> list[Object]:
    """The pods that are not terminating."""
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def num_nodes(resource: Object) -> int:
    """Number of pods of each engine in a spec, which may be invalid."""
    nodes = dig(resource, "spec", "engine", "nodes")
    return nodes if isinstance(nodes, int) else 1


def sets_of(observed: Observed) -> Iterator[tuple[int | None, Object]]:
    """The StatefulSets, each after the number of its group; None: each pod is an engine."""
    for ref, child in observed.children.items():
        if ref.kind == "StatefulSet":
            yield group_number(observed.name, ref.name), child


def groups_of(observed: Observed) -> list[Group]:
    """The groups, by number."""
    pods, groups = pods_by_owner(observed), list[Group]()
    for number, owner in sets_of(observed):
        existing = pods.get(owner["metadata"]["uid"], [])
        size = int(owner["spec"].get("replicas", 1))
        groups += (
            [Group(number, owner, size, (*existing,))] if number is not None else singles(owner, existing)
        )
    return sorted(groups, key=lambda group: group.number or 0)


def singles(owner: Object, pods: Iterable[Object]) -> list[Group]:
    """A group for each pod of a StatefulSet, also for missing pods."""
    groups = [Group(None, owner, 1, (pod,)) for pod in pods]
    return groups + [Group(None, owner, 1, ())] * (owner["spec"].get("replicas", 1) - len(groups))


def count_engines(observed: Observed) -> tuple[int, int]:
    """Number of engines that have pods, and number of ready engines."""
    groups = [group for group in groups_of(observed) if group.pods]
    return len(groups), sum(group.is_ready for group in groups)


def next_eviction(
    groups: Iterable[Group], template: Object, too_large: Sequence[Object] = ()
) -> tuple[Object, ...]:
    """The pods to replace now: all pods of one group that do not match the spec, or none.

    Groups are replaced one at a time: no group is replaced while a pod of another group is missing,
    terminating, or new and not ready yet. A spec that can't run therefore stops after one group, and the
    others keep serving. Groups that are not ready come first, and then the order of ``groups`` decides. A
    group with pods of two specs never starts, so its replacement waits for no other group.

    Pods of ``too_large`` have no node and serve nothing. They are replaced without waiting for other pods.
    """
    uids = {pod["metadata"]["uid"] for pod in too_large}

    def is_large(pod: Object) -> bool:
        return pod["metadata"]["uid"] in uids

    def is_replaced(pod: Object) -> bool:
        return is_large(pod) or is_outdated(pod, template)

    choices, is_busy = list[tuple[bool, bool, tuple[Object, ...]]](), False
    for group in groups:
        present = staying(group.pods)
        pods = [*filter(is_replaced, present)]
        is_moving = len(present) < max(group.size, len(group.pods)) or any(
            not (is_ready(pod) or is_replaced(pod)) for pod in present
        )
        is_busy = is_busy or is_moving
        if pods and group.owner["spec"].get("replicas", 1) and not is_unseen(group.owner, template):
            must_wait = not (is_moving or any(map(is_large, pods)))
            # An unready pod takes up the budget, which then never allows the eviction of a ready one.
            choices.append((must_wait, group.is_ready, tuple(sorted(pods, key=is_ready))))
    must_wait, _, chosen = min(choices, key=lambda choice: choice[:2], default=(False, False, ()))
    return () if must_wait and is_busy else chosen
