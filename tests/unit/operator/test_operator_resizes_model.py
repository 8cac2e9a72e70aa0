"""Model-based test of resizing memory tiers: random answers of kubelet and sidecar, and killed operators."""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from lmcache_operator.pods.resize import sidecar_memory

from tests.harness.operator_resizes import MI, Node, annotated_sizes, limits
from tests.harness.scope import examples

SMALL = 1024


@settings(max_examples=examples(60), stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow])
class Resizes(RuleBasedStateMachine):
    """No sidecar exceeds its cgroup, no pod is deleted, and finally all sizes match the spec."""

    @initialize(replicas=st.integers(1, 3))
    def start(self, replicas: int) -> None:
        self.node = Node(replicas)
        self.declared = SMALL

    def pods(self) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(self.node.sidecars))

    @rule(size=st.sampled_from([256, 512, 1024, 1536, 2048, 4096, 5632]))
    def declare(self, size: int) -> None:
        self.node.declare(f"{size}Mi")
        self.declared = size

    @rule(num_writes_before_kill=st.none() | st.integers(1, 4))
    def operate(self, num_writes_before_kill: int | None) -> None:
        for write in self.node.operate(num_writes_before_kill):
            assert write.startswith(("apply", "annotate", "resize")), write

    @rule(data=st.data(), verdict=st.sampled_from(["granted", "granted", "Deferred", "Infeasible"]))
    def answer_as_kubelet(self, data: st.DataObject, verdict: str) -> None:
        self.node.answer(data.draw(self.pods()), verdict)

    @rule(data=st.data())
    def sync_size_file(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].sync_file()

    @rule(data=st.data())
    def resize_or_restart_sidecar(self, data: st.DataObject) -> None:
        self.node.sidecars[data.draw(self.pods())].restart()

    @rule(data=st.data(), is_silent=st.booleans())
    def set_sidecar_silence(self, data: st.DataObject, is_silent: bool) -> None:
        self.node.sidecars[data.draw(self.pods())].is_silent = is_silent

    @rule(minutes=st.sampled_from([1, 15, 70]))
    def wait(self, minutes: int) -> None:
        self.node.wait(minutes)

    @rule(data=st.data())
    def replace_pod(self, data: st.DataObject) -> None:
        self.node.replace(data.draw(self.pods()))

    @invariant()
    def check_cgroup_limits(self) -> None:
        for sidecar in self.node.sidecars.values():
            assert sidecar_memory(max(sidecar.size, sidecar.file)) <= sidecar.granted

    def teardown(self) -> None:
        node = self.node
        for sidecar in node.sidecars.values():
            sidecar.is_silent = False
        node.converge()
        node.wait(120)
        node.converge()
        for name, pod in node.world.pods.items():
            max_bytes = int(
                next(v["value"] for v in pod["spec"]["initContainers"][0]["env"] if "MAX" in v["name"])
            )
            fitting_sizes = [
                size for size in (self.declared,) if sidecar_memory(min(size * MI, max_bytes)) <= 6 << 30
            ]
            if fitting_sizes:
                assert annotated_sizes(node)[name] == min(fitting_sizes[0], max_bytes // MI)
                assert node.sidecars[name].size == annotated_sizes(node)[name] * MI
            limit = -(-sidecar_memory(annotated_sizes(node)[name] * MI) // MI)
            assert limits(node)[name] == node.sidecars[name].granted // MI == limit


TestResizes = Resizes.TestCase
