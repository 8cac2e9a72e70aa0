"""Model-based test of chosen sizes when the operator is killed after any write, and users change the spec."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from lmcache_operator.policy.report import Choice
from lmcache_operator.specs.kinds import Ref
from tests.harness.operator.autoscaling import GIB, ScriptedAutoscaler
from tests.harness.operator.components import ReconciledCluster
from tests.harness.operator.model import World
from tests.harness.operator.plans import STATEFUL_SET
from tests.harness.scope import examples

CONFIG = Ref("ConfigMap", "demo-autoscaling")
MIN_GIB, MAX_GIB = 16, 128
AUTO = {"mode": "Auto", "memory": {"minSize": f"{MIN_GIB}Gi", "maxSize": f"{MAX_GIB}Gi"}}
SIZES = st.integers(MIN_GIB, MAX_GIB)


class KilledError(BaseException):
    """The operator was killed."""


class KillableWorld(World):
    """A world in which the operator is killed after its n-th write, before it reads the answer."""

    num_left = 1 << 30

    async def apply(self, wanted: Any, uid: str | None) -> None:
        await super().apply(wanted, uid)
        self._count_write()

    async def apply_status(self, wanted: Any, *manager: str) -> Any:
        live = await super().apply_status(wanted, *manager)
        self._count_write()
        return live

    def _count_write(self) -> None:
        self.num_left -= 1
        if self.num_left == 0:
            raise KilledError


class SizesMachine(RuleBasedStateMachine):
    """A cluster whose operator is killed and restarted."""

    def __init__(self) -> None:
        super().__init__()
        self.bench, self.declared, self.is_auto = ReconciledCluster(), 64, True
        self.world = self.bench.world = KillableWorld(self.bench.world.resource)
        self._declare()
        self._start()
        self.bench.settle()
        self.pods = {name: pod["metadata"]["uid"] for name, pod in self.bench.world.pods.items()}

    def _declare(self) -> None:
        tiers = {"memory": {"size": f"{self.declared}Gi"}}
        self.bench.world.change(
            tiers=tiers, autoscaling=AUTO | ({} if self.is_auto else {"mode": "Recommend"})
        )

    def _start(self) -> None:
        self.bench.autoscaler = self.watcher = ScriptedAutoscaler(CONFIG)
        self.bench.restart_operator()

    def _size(self) -> int:
        """Memory size of new pods in GiB."""
        template = self.bench.world.objects[STATEFUL_SET]["spec"]["template"]
        arguments = template["spec"]["initContainers"][0]["args"]
        (size,) = [arg for arg in arguments if arg.startswith("--memory-size=")]
        return int(size.partition("=")[2]) // GIB

    @rule(size=SIZES)
    def choose(self, size: int) -> None:
        self.watcher.choice = Choice(size * GIB, self.declared * GIB)

    @rule(size=SIZES)
    def declare(self, size: int) -> None:
        self.declared = size
        self._declare()

    @rule(is_auto=st.booleans())
    def change_mode(self, is_auto: bool) -> None:
        self.is_auto = is_auto
        self._declare()

    @rule()
    def edit_state_by_hand(self) -> None:
        if CONFIG in self.bench.world.objects:
            self.bench.world.edit(CONFIG, "data", "state", value="more")

    @rule(num_writes=st.integers(1, 4))
    def kill_operator(self, num_writes: int) -> None:
        self.world.num_left = num_writes
        try:
            self.bench.settle()
        except KilledError:
            self._start()
        self.world.num_left = 1 << 30

    @rule()
    def restart_when_settled(self) -> None:
        self.bench.settle()
        before = self._size()
        self._start()
        self.bench.reconcile()
        assert (self.bench.writes, self._size()) == ([], before)

    @rule()
    def check_settled_size(self) -> None:
        """The size is the latest choice, or a later value of the spec. No pod was replaced."""
        self.bench.settle()
        choice = self.watcher.choice
        is_chosen = self.is_auto and choice and choice.instead_of == self.declared * GIB
        assert self._size() == (choice.size // GIB if is_chosen and choice else self.declared)
        assert {name: pod["metadata"]["uid"] for name, pod in self.bench.world.pods.items()} == self.pods

    def teardown(self) -> None:
        self.check_settled_size()


TestSizes = SizesMachine.TestCase
TestSizes.settings = settings(max_examples=examples(30), stateful_step_count=15)
