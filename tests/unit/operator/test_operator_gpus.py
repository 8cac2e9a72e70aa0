"""How GPUs reach the pod, and who copies KV out of them: declared, rendered, changed, told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from lmcache_operator.__main__ import main
from lmcache_operator.api.parse import parse
from lmcache_operator.components.base import Context
from lmcache_operator.components.engine.engine import Engine
from lmcache_operator.components.engine.gpus import planned_transfer
from lmcache_operator.errors import ApiError, InvalidSpecError, RefusedError
from lmcache_operator.kube.client import KubeApi, error_of
from lmcache_operator.reconcile.reconciler import Reconciler
from lmcache_operator.specs.kinds import ClusterKey, Ref
from lmcache_operator.specs.names import STOCK_IMAGES

from tests.harness.operator_model import NAME, NAMESPACE, UID, World, cluster

CLAIMS = {"gpu": {"deviceClassName": "gpu.nvidia.com"}}
TWO = {"gpu": {"deviceClassName": "gpu.nvidia.com", "count": 2}, "parallelism": {"tensor": 2}}
TEMPLATE, STATEFUL_SET = Ref("ResourceClaimTemplate", "demo-engine"), Ref("StatefulSet", "demo-engine")


def spec(engine: dict[str, Any] | None = None, transfer: str = "Auto") -> dict[str, Any]:
    return {"engine": engine or {}, "sidecar": {"transfer": transfer}}


def rendered(allow_all_gpus: bool = False, **changes: Any) -> dict[Ref, dict[str, Any]]:
    objects = Engine().render(parse(cluster(**changes)), Context(STOCK_IMAGES, "", allow_all_gpus))
    return {Ref(o["kind"], o["metadata"]["name"]): o for o in objects}


def pod(allow_all_gpus: bool = False, **changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = rendered(allow_all_gpus, **changes)[STATEFUL_SET]["spec"]["template"]["spec"]
    return found


def env_of(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


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
def test_who_copies(changes: dict[str, Any], allow_all_gpus: bool, mode: str, reason: str) -> None:
    found = planned_transfer(parse(cluster(**changes)), allow_all_gpus)
    assert found[:2] == (mode, reason)


def test_engine_and_sidecar_share_one_claim() -> None:
    objects, spec_ = rendered(engine=TWO), pod(engine=TWO)
    request = {"name": "gpu", "exactly": {"count": 2, "deviceClassName": "gpu.nvidia.com"}}
    assert objects[TEMPLATE]["spec"] == {"spec": {"devices": {"requests": [request]}}}
    assert spec_["resourceClaims"] == [{"name": "gpu", "resourceClaimTemplateName": "demo-engine"}]
    engine, (sidecar, payload) = spec_["containers"][0], spec_["initContainers"]
    assert engine["resources"]["claims"] == sidecar["resources"]["claims"] == [{"name": "gpu"}]
    assert "limits" not in engine["resources"]
    assert "claims" not in payload["resources"]
    # What the claim does not give, the container runtime must not add.
    assert env_of(sidecar)["NVIDIA_VISIBLE_DEVICES"] == "void"


def test_a_sidecar_that_is_not_to_copy_names_no_claim() -> None:
    spec_ = pod(**spec(CLAIMS, "SharedMemory"))
    assert spec_["containers"][0]["resources"]["claims"] == [{"name": "gpu"}]
    assert "claims" not in spec_["initContainers"][0]["resources"]


def test_all_gpus_are_visible_only_where_the_operator_allows_it() -> None:
    allowed, forbidden = (env_of(pod(allow)["initContainers"][0]) for allow in (True, False))
    assert (allowed["NVIDIA_VISIBLE_DEVICES"], forbidden["NVIDIA_VISIBLE_DEVICES"]) == ("all", "void")
    assert allowed["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert "NVIDIA_DRIVER_CAPABILITIES" not in forbidden
    # What nobody needs is not shown: no sidecar that does not copy sees a GPU.
    assert env_of(pod(True, **spec({}, "SharedMemory"))["initContainers"][0]) == forbidden
    assert rendered(True, **spec(CLAIMS))[STATEFUL_SET] == rendered(False, **spec(CLAIMS))[STATEFUL_SET]


def test_each_gpu_that_the_sidecar_copies_out_of_has_host_memory() -> None:
    def mebibytes(engine: dict[str, Any]) -> int:
        limits = pod(engine=engine)["initContainers"][0]["resources"]["limits"]
        return int(limits["memory"].removesuffix("Mi"))

    assert mebibytes(TWO) - mebibytes({}) == 2 * 256
    assert mebibytes({"gpu": {"count": 2}, "parallelism": {"tensor": 2}}) == mebibytes({})


@pytest.mark.parametrize("allow_all_gpus", [False, True])
@pytest.mark.parametrize("engine", [{}, TWO, {"gpu": {"count": 0}}])
def test_the_sidecar_is_told_what_was_asked_for(
    engine: dict[str, Any], allow_all_gpus: bool, tmp_path: Path
) -> None:
    config = pytest.importorskip("lmcache_sidecar.config")
    for transfer in ("Auto", "CudaIPC", "SharedMemory"):
        found = rendered(allow_all_gpus, **spec(engine, transfer))[Ref("ConfigMap", "demo-sidecar")]
        file = tmp_path / "sidecar.yaml"
        file.write_text(found["data"]["sidecar.yaml"])
        read = config.read({"config": str(file), "memory_size": "1073741824"}, {}).usable()
        assert read.transfer == transfer


def test_a_template_may_not_take_the_sidecars_gpus_away() -> None:
    template = {"spec": {"initContainers": [{"name": "sidecar", "resources": {"claims": None}}]}}
    with pytest.raises(InvalidSpecError, match=r"initContainers\[sidecar\].resources.claims"):
        rendered(engine=CLAIMS | {"podTemplate": template})
    template = {"spec": {"resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "mine"}]}}
    with pytest.raises(InvalidSpecError, match=r"resourceClaims\[gpu\].resourceClaimTemplateName"):
        rendered(engine=CLAIMS | {"podTemplate": template})
    more = {"spec": {"containers": [{"name": "engine", "resources": {"claims": [{"name": "nic"}]}}]}}
    found = pod(engine=CLAIMS | {"podTemplate": more})["containers"][0]["resources"]["claims"]
    assert found == [{"name": "gpu"}, {"name": "nic"}]


def test_render_takes_the_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump(cluster()))
    for flags, value in (((), "void"), (("--allow-all-gpus-sidecar",), "all")):
        assert main(["render", "-f", str(file), *flags]) == 0
        *_, stateful_set, injection = yaml.safe_load_all(capsys.readouterr().out)
        for template in (stateful_set["spec"]["template"], injection["template"]):
            sidecar = template["spec"]["initContainers"][0]
            assert env_of(sidecar)["NVIDIA_VISIBLE_DEVICES"] == value


# -- a living cluster


class Rig:
    """A cluster of engines that is reconciled, with pods whose sidecars can be asked."""

    def __init__(self, allow_all_gpus: bool = False, world: World | None = None, **changes: Any) -> None:
        self.world = world or World(cluster(**changes))
        context = Context(STOCK_IMAGES, "", allow_all_gpus)
        self.reconciler = Reconciler(
            cast(KubeApi, self.world), context, self.world.ask, components=[Engine()]
        )

    def settle(self) -> list[str]:
        """Reconcile until nothing is written; what was, without the status."""
        written: list[str] = []
        for _ in range(12):
            self.world.run_stateful_sets()
            self.world.writes.clear()
            asyncio.run(self.reconciler.reconcile(ClusterKey(NAMESPACE, NAME, UID)))
            if not self.world.writes:
                return [write for write in written if write != "status"]
            written += self.world.writes
        raise AssertionError(f"does not come to rest: {written}")

    def says(self, **transfer: str) -> None:
        """All sidecars answer, with this about their transfers."""
        for number, found in enumerate(self.world.pods.values()):
            found["status"] |= {"phase": "Running", "podIP": f"10.0.0.{number}"}
            stats = {"is_ready": True, "num_clients": {"attached": 1}, "transfer": transfer}
            self.world.stats[f"10.0.0.{number}"] = stats
        self.settle()

    @property
    def transfer(self) -> dict[str, str]:
        found: dict[str, str] = self.world.resource["status"]["transfer"]
        return found

    def condition(self, kind: str) -> tuple[str, str, str]:
        (found,) = [c for c in self.world.resource["status"]["conditions"] if c["type"] == kind]
        return found["status"], found["reason"], found["message"]


def test_claims_come_change_and_go_on_a_living_cluster() -> None:
    rig = Rig()
    rig.settle()
    rig.world.change(engine=CLAIMS)
    written = rig.settle()
    assert written == [f"apply {TEMPLATE}", f"apply {STATEFUL_SET}", "evict demo-engine-0"]
    assert rig.transfer["reason"] == "DRAClaimShared"
    rig.world.change(engine=TWO)
    # Nobody can change a template's spec. A pod that is made before the new one is there has the old claim:
    # it must not pass for what is wanted now, so the pods' template is written last.
    assert rig.settle() == [
        f"delete {TEMPLATE}", f"apply {TEMPLATE}", f"apply {STATEFUL_SET}", "evict demo-engine-0",
    ]  # fmt: skip
    assert rig.world.objects[TEMPLATE]["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == 2
    rig.world.change(engine={"gpu": {"deviceClassName": None}})
    assert rig.settle() == [f"apply {STATEFUL_SET}", f"delete {TEMPLATE}", "evict demo-engine-0"]
    assert rig.condition("Ready")[0] == "True"


def test_where_claims_cannot_be_had_the_pods_serve() -> None:
    rig = Rig()
    rig.settle()
    refused = RefusedError("PATCH x", "it needs a newer Kubernetes")
    rig.world.failures["apply ResourceClaimTemplate"] = refused
    rig.world.change(engine=CLAIMS)
    assert rig.settle() == []
    assert "resourceClaims" not in rig.world.objects[STATEFUL_SET]["spec"]["template"]["spec"]
    status, reason, message = rig.condition("Degraded")
    assert (status, reason) == ("True", "Refused")
    assert "needs a newer Kubernetes" in message
    assert rig.condition("EngineAvailable")[0] == "True"
    rig.world.failures.clear()
    assert rig.settle() == [f"apply {TEMPLATE}", f"apply {STATEFUL_SET}", "evict demo-engine-0"]


@pytest.mark.parametrize("field", ["labels", "annotations"])
def test_a_template_whose_metadata_somebody_changed_is_repaired_in_place(field: str) -> None:
    rig = Rig(engine=CLAIMS)
    rig.settle()
    uid = rig.world.objects[TEMPLATE]["metadata"]["uid"]
    rig.world.edit(TEMPLATE, "metadata", field, "lmcache.io/x", value="y")
    name = {"labels": "lmcache.io/component", "annotations": "lmcache.io/rendered-hash"}[field]
    rig.world.edit(TEMPLATE, "metadata", field, name, value="theirs")
    rig.settle()
    live = rig.world.objects[TEMPLATE]["metadata"]
    assert live[field][name] != "theirs"
    assert (live["uid"] == uid) is (field == "labels")


def test_what_somebody_else_made_is_left_alone() -> None:
    rig = Rig(engine=CLAIMS)
    rig.world.objects[TEMPLATE] = {"metadata": {"name": "demo-engine", "uid": "1", "labels": {}}}
    rig.settle()
    assert rig.world.objects[TEMPLATE]["metadata"]["uid"] == "1"
    assert rig.condition("Degraded")[1] == "NameTaken"


def test_a_change_of_the_transfer_replaces_pods() -> None:
    rig = Rig(engine=CLAIMS)
    rig.settle()
    rig.world.change(sidecar={"transfer": "SharedMemory"})
    assert "evict demo-engine-0" in rig.settle()
    assert rig.transfer == {
        "requested": "SharedMemory", "mode": "SharedMemory", "reason": "Requested",
        "message": "the engine copies, as spec.sidecar.transfer asks for",
    }  # fmt: skip


@pytest.mark.parametrize("engine", [{}, CLAIMS], ids=["device plugin", "claims"])
def test_to_ask_for_cuda_ipc_instead_of_auto_replaces_no_pod(engine: dict[str, Any]) -> None:
    """Both mean the same to a pod; the difference is what the status says."""
    rig = Rig(engine=engine)
    rig.settle()
    rig.world.change(sidecar={"transfer": "CudaIPC"})
    assert not [write for write in rig.settle() if write.startswith("evict")]
    assert rig.transfer["requested"] == "CudaIPC"
    rig.world.change(sidecar={"transfer": "SharedMemory"})
    assert "evict demo-engine-0" in rig.settle()
    rig.world.change(sidecar={"transfer": "CudaIPC"})
    assert "evict demo-engine-0" in rig.settle()


def test_another_operator_flag_replaces_no_pod() -> None:
    rig = Rig()
    rig.settle()
    other = Rig(allow_all_gpus=True, world=rig.world)
    assert other.settle() == [f"apply {STATEFUL_SET}"]
    assert other.transfer["reason"] == "AllGPUsVisible"


def test_cuda_ipc_that_cannot_be_had_is_a_condition_and_the_pods_serve() -> None:
    rig = Rig(sidecar={"transfer": "CudaIPC"})
    rig.settle()
    status, reason, message = rig.condition("Degraded")
    assert (status, reason) == ("True", "CudaIPCUnavailable")
    assert "spec.engine.gpu.deviceClassName" in message
    assert "--allow-all-gpus-sidecar" in message
    assert rig.condition("Ready")[0] == rig.condition("EngineAvailable")[0] == "True"
    rig.world.change(engine=CLAIMS)
    rig.settle()
    assert rig.condition("Degraded")[0] == "False"


def test_where_it_is_not_asked_for_nothing_is_amiss() -> None:
    rig = Rig()
    rig.settle()
    assert rig.transfer["reason"] == "GPUNotShared"
    assert rig.condition("Degraded")[0] == "False"


def test_what_sidecars_say_at_run_time_leads() -> None:
    rig = Rig(engine=CLAIMS | {"replicas": 2}, sidecar={"transfer": "CudaIPC"})
    rig.settle()
    rig.says(mode="CudaIPC", reason="")
    assert (rig.transfer["mode"], rig.transfer["reason"]) == ("CudaIPC", "DRAClaimShared")
    rig.says(mode="SharedMemory", reason="error 201 for the mapping 1")
    message = "2 of 2 sidecars leave copying to their engines: pod demo-engine-0: error 201 for the mapping 1"
    assert rig.transfer == {
        "requested": "CudaIPC", "mode": "SharedMemory", "reason": "SidecarCannotCopy", "message": message,
    }  # fmt: skip
    assert rig.condition("Degraded")[:2] == ("True", "CudaIPCUnavailable")
    assert rig.condition("Ready")[0] == "True"
    # The same with other figures is no news.
    rig.world.writes.clear()
    rig.says(mode="SharedMemory", reason="error 201 for the mapping 2")
    assert rig.transfer["message"] == message
    rig.says(mode="CudaIPC", reason="")
    assert rig.condition("Degraded")[0] == "False"


def test_while_an_engine_starts_its_sidecar_is_not_taken_at_its_word() -> None:
    rig = Rig(engine=CLAIMS, sidecar={"transfer": "CudaIPC"})
    rig.settle()
    rig.world.set_ready("demo-engine-0", False)
    rig.says(mode="SharedMemory", reason="the reader of its GPU is starting")
    assert (rig.transfer["mode"], rig.condition("Degraded")[0]) == ("CudaIPC", "False")


@pytest.mark.parametrize("said", ["x", [1], {"mode": 5}, {"mode": ""}, {}])
def test_what_says_nothing_about_it_changes_nothing(said: Any) -> None:
    rig = Rig(engine=CLAIMS)
    rig.settle()
    rig.says()
    for stats in rig.world.stats.values():
        stats["transfer"] = said
    rig.settle()
    assert rig.transfer["mode"] == "CudaIPC"


def test_the_mode_in_use_outlives_what_hides_it() -> None:
    """A spec that can't be rendered, and a moment in which nobody could be asked."""
    rig = Rig(engine=CLAIMS)
    rig.settle()
    rig.says(mode="SharedMemory", reason="no driver")
    before = dict(rig.transfer)
    rig.world.change(engine={"args": ["--port=1"]})
    rig.settle()
    assert rig.transfer == before
    assert rig.condition("Degraded")[1] == "InvalidSpec"


def test_a_kind_that_the_api_server_does_not_know_is_named() -> None:
    error: ApiError = error_of("PATCH x", 404, b"404 page not found\n")
    assert "needs a newer Kubernetes" in error.message
    missing = b'{"message": "namespaces \\"x\\" not found", "reason": "NotFound"}'
    assert error_of("PATCH x", 404, missing).message == 'namespaces "x" not found'
