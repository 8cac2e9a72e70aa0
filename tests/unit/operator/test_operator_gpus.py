"""GPUs of a pod, and the transfer mode of its KV: as specified, rendered, changed and reported."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_operator.__main__ import main
from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.gpus import planned_transfer
from lmcache_operator.components.remote.remote import Remote
from lmcache_operator.contract.base import Context
from lmcache_operator.errors import InvalidSpecError, RefusedError
from lmcache_operator.kube.refusals import error_of
from lmcache_operator.specs.kinds import Ref
from lmcache_operator.specs.names import STOCK_IMAGES
from lmcache_sidecar import config
from tests.harness.operator.components import GOOD, ReconciledCluster
from tests.harness.operator.model import World, cluster
from tests.harness.operator.render import child_of, container, env_of, pod_of

CLAIMS = {"gpu": {"deviceClassName": "gpu.nvidia.com"}}
TWO = {"gpu": {"deviceClassName": "gpu.nvidia.com", "count": 2}, "parallelism": {"tensor": 2}}
TEMPLATE, STATEFUL_SET = Ref("ResourceClaimTemplate", "demo-engine"), Ref("StatefulSet", "demo-engine")


def spec(engine: dict[str, Any] | None = None, transfer: str = "Auto") -> dict[str, Any]:
    return {"engine": engine or {}, "sidecar": {"transfer": transfer}}


def context(allow_all_gpus: bool) -> Context:
    return Context(STOCK_IMAGES, "", allow_all_gpus)


def sidecar(allow_all_gpus: bool = False, **changes: Any) -> dict[str, Any]:
    return container(pod_of(context(allow_all_gpus), **changes), "sidecar")


@pytest.mark.parametrize(
    ("changes", "allow_all_gpus", "mode", "reason"),
    [
        (spec(), False, "SharedMemory", "GPUNotShared"),
        (spec(), True, "CudaIPC", "AllGPUsVisible"),
        (spec(CLAIMS), False, "CudaIPC", "DRAClaimShared"),
        (spec(CLAIMS), True, "CudaIPC", "DRAClaimShared"),
        (spec(CLAIMS, "SharedMemory"), True, "SharedMemory", "Requested"),
        (spec({}, "CudaIPC"), False, "SharedMemory", "GPUNotShared"),
        (spec({"gpu": {"count": 0}}, "CudaIPC"), True, "SharedMemory", "NoGPU"),
        (spec({"gpu": {"count": 0, "deviceClassName": "x"}}), False, "SharedMemory", "NoGPU"),
    ],
)
def test_transfer_mode_follows_spec_and_gpus(changes, allow_all_gpus, mode, reason):
    transfer = planned_transfer(parse(cluster(**changes)), allow_all_gpus)
    assert transfer[:2] == (mode, reason)


def test_sidecar_that_does_not_copy_has_no_claim() -> None:
    pod = pod_of(**spec(CLAIMS, "SharedMemory"))
    assert container(pod, "engine")["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in container(pod, "sidecar")["resources"]


def test_all_gpus_are_visible_only_if_the_operator_allows_it() -> None:
    allowed, forbidden = (env_of(sidecar(allow)) for allow in (True, False))
    assert (allowed["NVIDIA_VISIBLE_DEVICES"], forbidden["NVIDIA_VISIBLE_DEVICES"]) == ("all", "void")
    assert allowed["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_DRIVER_CAPABILITIES" not in forbidden
    # A sidecar that does not copy sees no GPU.
    assert env_of(sidecar(True, **spec({}, "SharedMemory"))) == forbidden
    assert sidecar(True, **spec(CLAIMS)) == sidecar(False, **spec(CLAIMS))


def with_limits(limits: dict[str, str]) -> Any:
    return {"spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]}}


@pytest.mark.parametrize(
    ("engine", "is_hidden"),
    [
        ({}, False),
        ({"gpu": {"count": 0}}, True),
        (CLAIMS, True),
        ({"gpu": {"count": 0}, "resources": {"limits": {"nvidia.com/mig-1g.5gb": 1}}}, False),
        ({"gpu": {"count": 0}, "podTemplate": with_limits({"nvidia.com/gpu": "1"})}, False),
        ({"gpu": {"count": 0}, "podTemplate": with_limits({"rdma/hca": "1"})}, True),
    ],
)
def test_variable_hides_gpus_from_engines_without_a_device_plugin(engine: Any, is_hidden: bool) -> None:
    """Images of users may show all GPUs of the node by default. A plugin sets the variable itself."""
    expected = "void" if is_hidden else None
    assert env_of(container(pod_of(engine=engine), "engine")).get("NVIDIA_VISIBLE_DEVICES") == expected
    variable = {"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}
    if is_hidden:
        with pytest.raises(InvalidSpecError, match=r"env\[NVIDIA_VISIBLE_DEVICES\]"):
            pod_of(engine=engine | {"env": [variable]})


def test_servers_of_the_remote_tier_see_no_gpus() -> None:
    tiers = {"remote": {"managed": {"memoryPerShard": "1Gi", "image": "mine:1"}}}
    template = child_of("StatefulSet", Remote(), tiers=tiers)["spec"]["template"]
    (server,) = template["spec"]["containers"]
    assert env_of(server)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_sidecar_memory_includes_an_overhead_for_each_shared_gpu() -> None:
    def mebibytes(engine: dict[str, Any]) -> int:
        return int(sidecar(engine=engine)["resources"]["limits"]["memory"].removesuffix("Mi"))

    assert mebibytes(TWO) - mebibytes({}) == 2 * 256
    assert mebibytes({"gpu": {"count": 2}, "parallelism": {"tensor": 2}}) == mebibytes({})


@pytest.mark.parametrize("allow_all_gpus", [False, True])
@pytest.mark.parametrize("engine", [{}, TWO, {"gpu": {"count": 0}}])
def test_sidecar_config_contains_the_requested_transfer(engine, allow_all_gpus, tmp_path):
    file = tmp_path / "sidecar.yaml"
    for transfer in ("Auto", "CudaIPC", "SharedMemory"):
        config_map = child_of("ConfigMap", context=context(allow_all_gpus), **spec(engine, transfer))
        file.write_text(config_map["data"]["sidecar.yaml"])
        settings = config.read({"config": str(file), "memory_size": "1073741824"}, {}).usable()
        assert settings.transfer == transfer


def test_pod_template_may_add_claims_but_not_remove_the_gpus() -> None:
    def claims(**template: Any) -> Any:
        return pod_of(engine=CLAIMS | {"podTemplate": {"spec": template}})["containers"][0]["resources"]

    with pytest.raises(InvalidSpecError, match=r"initContainers\[sidecar\].resources.claims"):
        claims(initContainers=[{"name": "sidecar", "resources": {"claims": None}}])
    with pytest.raises(InvalidSpecError, match=r"resourceClaims\[gpu\].resourceClaimTemplateName"):
        claims(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "mine"}])
    nic = {"name": "engine", "resources": {"claims": [{"name": "nic"}]}}
    assert claims(containers=[nic])["claims"] == [{"name": "gpu"}, {"name": "nic"}]


def test_render_accepts_the_flag_for_all_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster()))
    for flags, value in (((), "void"), (("--allow-all-gpus-sidecar",), "all")):
        assert main(["render", "-f", str(file), *flags]) == 0
        *_, stateful_set, injection = yaml.safe_load_all(capsys.readouterr().out)
        for template in (stateful_set["spec"]["template"], injection["template"]):
            assert env_of(template["spec"]["initContainers"][0])["NVIDIA_VISIBLE_DEVICES"] == value


# -- changes of an existing cluster


class Rig(ReconciledCluster):
    """A cluster of engines, and pods whose sidecars answer."""

    def __init__(self, allow_all_gpus: bool = False, world: World | None = None, **changes: Any) -> None:
        super().__init__([Engine()], context(allow_all_gpus), **changes)
        if world:
            self.world = world
            self.restart_operator()

    def settle(self) -> list[str]:
        """Reconcile until nothing is written. Return the writes other than the status."""
        return [write for write in super().settle() if write != "status"]

    def report_transfer(self, **transfer: str) -> None:
        """Let all sidecars answer with these transfer statistics, and settle."""
        self.answer(*[GOOD | {"transfer": transfer}] * len(self.world.pods))
        self.settle()

    @property
    def transfer(self) -> dict[str, str]:
        return self.world.resource["status"]["transfer"]


def test_pods_serve_without_claims_on_an_older_kubernetes() -> None:
    rig = Rig.settled()
    rig.world.failures["apply ResourceClaimTemplate"] = RefusedError("PATCH x", "needs a newer Kubernetes")
    assert rig.change(engine=CLAIMS) == []
    assert "resourceClaims" not in rig.world.objects[STATEFUL_SET]["spec"]["template"]["spec"]
    assert rig.condition("Degraded") == ("True", "Refused")
    assert "needs a newer Kubernetes" in rig.message("Degraded")
    assert rig.condition("EngineAvailable")[0] == "True"
    rig.world.failures.clear()
    assert rig.settle() == [f"apply {TEMPLATE}", f"apply {STATEFUL_SET}", "evict demo-engine-0"]


@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_edited_labels_of_a_claim_template_are_repaired(field: str) -> None:
    rig = Rig.settled(engine=CLAIMS)
    uid = rig.world.objects[TEMPLATE]["metadata"]["uid"]
    rig.world.edit(TEMPLATE, "metadata", field, "lmcache.io/x", value="y")
    name = {"labels": "lmcache.io/component", "annotations": "lmcache.io/rendered-hash"}[field]
    rig.world.edit(TEMPLATE, "metadata", field, name, value="theirs")
    rig.settle()
    live = rig.world.objects[TEMPLATE]["metadata"]
    assert live[field][name] != "theirs"
    assert (live["uid"] == uid) is (field == "labels")


def test_claim_template_of_another_owner_is_not_changed() -> None:
    rig = Rig(engine=CLAIMS)
    rig.world.objects[TEMPLATE] = {"metadata": {"name": "demo-engine", "uid": "1", "labels": {}}}
    rig.settle()
    assert rig.world.objects[TEMPLATE]["metadata"]["uid"] == "1"
    assert rig.condition("Degraded")[1] == "NameTaken"


@pytest.mark.parametrize("engine", [{}, CLAIMS], ids=["device plugin", "claims"])
def test_change_from_auto_to_cuda_ipc_replaces_no_pod(engine: dict[str, Any]) -> None:
    """Both settings give the same pod. Only the status differs."""
    rig = Rig.settled(engine=engine)
    assert not [write for write in rig.change(sidecar={"transfer": "CudaIPC"}) if write.startswith("evict")]
    assert rig.transfer["requested"] == "CudaIPC"
    assert "evict demo-engine-0" in rig.change(sidecar={"transfer": "SharedMemory"})
    message = "spec.sidecar.transfer is SharedMemory"
    shared = {"requested": "SharedMemory", "mode": "SharedMemory", "reason": "Requested", "message": message}
    assert rig.transfer == shared
    assert "evict demo-engine-0" in rig.change(sidecar={"transfer": "CudaIPC"})


def test_changed_operator_flag_replaces_no_pod() -> None:
    rig = Rig.settled()
    other_rig = Rig(allow_all_gpus=True, world=rig.world)
    assert other_rig.settle() == [f"apply {STATEFUL_SET}"]
    assert other_rig.transfer["reason"] == "AllGPUsVisible"


def test_unavailable_cuda_ipc_degrades_the_cluster_and_pods_serve() -> None:
    rig = Rig.settled(sidecar={"transfer": "CudaIPC"})
    assert rig.condition("Degraded") == ("True", "CudaIPCUnavailable")
    assert "spec.engine.gpu.deviceClassName" in rig.message("Degraded")
    assert "--allow-all-gpus-sidecar" in rig.message("Degraded")
    assert rig.condition("Ready")[0] == rig.condition("EngineAvailable")[0] == "True"
    rig.change(engine=CLAIMS)
    assert rig.condition("Degraded")[0] == "False"
    rig.change(engine={"gpu": {"deviceClassName": None}}, sidecar={"transfer": "Auto"})
    assert (rig.transfer["reason"], rig.condition("Degraded")[0]) == ("GPUNotShared", "False")


def test_status_shows_the_transfer_that_sidecars_report() -> None:
    rig = Rig.settled(engine=CLAIMS | {"replicas": 2}, sidecar={"transfer": "CudaIPC"})
    rig.report_transfer(mode="CudaIPC", reason="")
    assert (rig.transfer["mode"], rig.transfer["reason"]) == ("CudaIPC", "DRAClaimShared")
    rig.report_transfer(mode="SharedMemory", reason="error 201 for the mapping 1.")
    count = "2 of 2 sidecars cannot copy, so their engines do"
    message = f"{count}. First: pod demo-engine-0: error 201 for the mapping 1."
    assert rig.transfer == {
        "requested": "CudaIPC", "mode": "SharedMemory", "reason": "SidecarCannotCopy", "message": message,
    }  # fmt: skip
    assert rig.condition("Degraded") == ("True", "CudaIPCUnavailable")
    assert rig.condition("Ready") == ("True", "Ready")
    # The same message with other figures is not written again.
    rig.world.writes.clear()
    rig.report_transfer(mode="SharedMemory", reason="error 201 for the mapping 2")
    assert rig.transfer["message"] == message
    rig.report_transfer(mode="CudaIPC", reason="")
    assert rig.condition("Degraded")[0] == "False"


def test_reported_transfer_is_ignored_while_the_engine_starts() -> None:
    rig = Rig.settled(engine=CLAIMS, sidecar={"transfer": "CudaIPC"})
    rig.world.set_ready("demo-engine-0", False)
    rig.report_transfer(mode="SharedMemory", reason="the reader of its GPU is starting")
    assert (rig.transfer["mode"], rig.condition("Degraded")[0]) == ("CudaIPC", "False")


@pytest.mark.parametrize("stats_value", ["x", [1], {"mode": 5}, {"mode": ""}, {}])
def test_invalid_transfer_statistics_are_ignored(stats_value: Any) -> None:
    rig = Rig.settled(engine=CLAIMS)
    rig.report_transfer()
    for stats in rig.world.stats.values():
        stats["transfer"] = stats_value
    rig.settle()
    assert rig.transfer["mode"] == "CudaIPC"


def test_transfer_status_survives_an_invalid_spec() -> None:
    """The status keeps the mode during an invalid spec, and while no sidecar is polled."""
    rig = Rig.settled(engine=CLAIMS)
    rig.report_transfer(mode="SharedMemory", reason="no driver")
    before = dict(rig.transfer)
    rig.change(engine={"args": ["--port=1"]})
    assert (rig.transfer, rig.condition("Degraded")[1]) == (before, "InvalidSpec")


def test_error_for_an_unknown_kind_asks_for_a_newer_kubernetes() -> None:
    assert "needs a newer Kubernetes" in error_of("PATCH x", 404, b"404 page not found\n").message
    missing = b'{"message": "namespaces \\"x\\" not found", "reason": "NotFound"}'
    assert error_of("PATCH x", 404, missing).message == 'namespaces "x" not found'
