"""Clusters with prefill pods, on an in-memory API server."""

from typing import Any

from lmcache_operator.api import KIND
from lmcache_operator.api.parse import parse
from lmcache_operator.components.prefill.prefill import PrefillPods
from lmcache_operator.components.registry import COMPONENTS
from lmcache_operator.contract.base import Context
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.model import cluster

CONTEXT = Context(STOCK_IMAGES)
CHILD, ROUTER = Ref(KIND, "demo-prefill"), Ref("Deployment", "demo-router")


def with_prefill(**changes: Any) -> dict[str, Any]:
    """Changes of a spec. ``changes`` are the settings of prefill."""
    return {"engine": {"replicas": 2, "prefill": changes}, "tiers": {"peers": {}}, "router": {}}


def child(changes: dict[str, Any]) -> dict[str, Any]:
    (rendered,) = PrefillPods().render(parse(cluster(**changes)), CONTEXT)
    return rendered


class Rig(ReconciledCluster):
    def __init__(self, **changes: Any) -> None:
        # No controller runs the router's Deployment here.
        super().__init__([each for each in COMPONENTS if each.name != "router"], **changes)

    @property
    def child(self) -> dict[str, Any]:
        return self.world.objects[CHILD]

    def report(self, num_ready: int, *, is_observed: bool = True, **conditions: tuple[str, str]) -> None:
        """Report the status of the prefill pods, as the operator does for their LMCacheCluster. Settle."""
        generation = self.child["metadata"]["generation"] - (not is_observed)
        given = {"Progressing": ("False", "Complete"), "Degraded": ("False", "AsDeclared")} | conditions
        self.child["status"] = {
            "replicas": 2,
            "readyReplicas": num_ready,
            "conditions": [
                {"type": kind, "status": status, "reason": reason, "message": f"it is {reason}",
                 "observedGeneration": generation}
                for kind, (status, reason) in given.items()
            ],
        }  # fmt: skip
        self.settle()


class FullRig(Rig):
    """A cluster with all components. The test is the controller of the router's Deployment."""

    def __init__(self, **changes: Any) -> None:
        ReconciledCluster.__init__(self, COMPONENTS, **changes)

    @property
    def uses_prefill_pods(self) -> bool:
        (container,) = self.world.objects[ROUTER]["spec"]["template"]["spec"]["containers"]
        return "--prefill-selector" in container["args"]

    def roll_out(self) -> None:
        """Replace all pods of the router."""
        router = self.world.objects[ROUTER]
        num_pods = router["spec"]["replicas"]
        counts = dict.fromkeys(("replicas", "readyReplicas", "updatedReplicas"), num_pods)
        router["status"] = {"observedGeneration": router["metadata"]["generation"]} | counts
