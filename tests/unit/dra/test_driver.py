"""The DRA driver of simulated GPUs, called by a simulated kubelet."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import grpc
import pytest

from testing.dra import kubelet_pb2
from testing.dra.driver import CLAIMS, CLASSES, GPUS_DIR, NAME, SLICES, GpuDriver, gpu_uuid
from testing.dra.plugin import DRA, REGISTRATION, DriverError, KubeletPlugin

UUIDS = [gpu_uuid("node", f"gpu-{number}") for number in range(3)]


class FakeApi:
    def __init__(self):
        self.objects = {}

    def get(self, kind, name, namespace=None):
        return self.objects[kind, name]

    def apply(self, kind, obj, namespace=None):
        self.objects[kind, obj["metadata"]["name"]] = obj

    def delete(self, kind, name, namespace=None):
        del self.objects[kind, name]

    def allocate(self, name, uid, *devices, driver=NAME):
        gpu, nic = ({"request": name, "driver": driver, "pool": "node"} for name in ("gpu", "nic"))
        results = [gpu | {"device": device} for device in devices]
        results.append(nic | {"driver": "net.example.com", "device": "nic-0"})
        status = {"allocation": {"devices": {"results": results}}}
        self.objects[CLAIMS, name] = {"metadata": {"name": name, "uid": uid}, "status": status}


class Kubelet:
    """Calls the plugin whose socket is in the kubelet's plugin folder."""

    def __init__(self, root: Path):
        (socket,) = (root / "plugins_registry").glob("*.sock")
        self.info = self.call(socket, REGISTRATION, "GetInfo", kubelet_pb2.InfoRequest(), "PluginInfo")
        self.socket = socket

    def call(self, socket, service, method, request, answer):
        # A kubelet sends the socket's path as the authority, unlike Python's gRPC.
        options = [("grpc.default_authority", str(socket).replace("/", "%2F"))]
        with grpc.insecure_channel(f"unix:{socket}", options) as channel:
            parse = getattr(kubelet_pb2, answer).FromString
            stub = channel.unary_unary(f"/{service}/{method}", lambda m: m.SerializeToString(), parse)
            return stub(request, timeout=60, wait_for_ready=True)

    def notify(self, error=""):
        status = kubelet_pb2.RegistrationStatus(plugin_registered=not error, error=error)
        method, answer = "NotifyRegistrationStatus", "RegistrationStatusResponse"
        self.call(self.socket, REGISTRATION, method, status, answer)

    def call_claims(self, method, answer, **claims):
        messages = [kubelet_pb2.Claim(namespace="app", name=name, uid=uid) for name, uid in claims.items()]
        request = kubelet_pb2.Claims(claims=messages)
        return dict(self.call(self.info.endpoint, DRA, method, request, answer).claims)

    def prepare(self, **claims):
        return self.call_claims("NodePrepareResources", "PreparedClaims", **claims)

    def unprepare(self, **claims):
        return self.call_claims("NodeUnprepareResources", "UnpreparedClaims", **claims)


@pytest.fixture
def tmp_path():
    """A folder with a short name: the path of a UNIX socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="dra-") as folder:
        yield Path(folder)


@pytest.fixture
def api():
    return FakeApi()


@pytest.fixture
def gpus(api, tmp_path):
    return GpuDriver(api, "node", 3, cdi=tmp_path / "cdi", state=tmp_path / "gpus")


@pytest.fixture
def served(gpus, tmp_path):
    with KubeletPlugin(gpus, tmp_path) as served:
        yield served


@pytest.fixture
def kubelet(served, tmp_path):
    return Kubelet(tmp_path)


def cdi_devices(tmp_path):
    """Devices as a container runtime finds them: device name -> edits of a container."""
    edits_by_device = {}
    for file in (tmp_path / "cdi").glob("*.json"):
        spec = json.loads(file.read_text())
        for device in spec["devices"]:
            edits = spec["containerEdits"] | device["containerEdits"]
            edits_by_device[f"{spec['kind']}={device['name']}"] = edits
    return edits_by_device


def test_devices_are_published_after_the_registration(api, served, kubelet):
    assert (kubelet.info.type, kubelet.info.name) == ("DRAPlugin", NAME)
    assert list(kubelet.info.supported_versions) == ["v1.DRAPlugin"]
    assert not api.objects
    kubelet.notify()
    served.wait_registered()
    (resource_slice,) = [obj for (kind, _), obj in api.objects.items() if kind == SLICES]
    assert [item["attributes"]["uuid"]["string"] for item in resource_slice["spec"]["devices"]] == UUIDS
    assert (CLASSES, NAME) in api.objects
    served.driver.retire()
    assert not api.objects


def test_missing_or_refused_registration_raises_error(served, kubelet):
    with pytest.raises(DriverError, match=r"no kubelet has contacted .*reg\.sock within 0\.01 s"):
        served.wait_registered(0.01)
    kubelet.notify("unsupported version")
    with pytest.raises(DriverError, match="refused the driver: unsupported version"):
        served.wait_registered()


def test_sockets_are_removed_with_the_driver(gpus, tmp_path):
    for _ in range(2):
        with KubeletPlugin(gpus, tmp_path):
            Kubelet(tmp_path)
        assert not list(tmp_path.rglob("*.sock"))


def test_claim_gets_only_devices_of_this_driver(api, kubelet, tmp_path):
    api.allocate("two", "u-2", "gpu-1", "gpu-2")
    prepared = kubelet.prepare(two="u-2")["u-2"]
    assert not prepared.error
    devices = [(d.pool_name, d.device_name, list(d.request_names)) for d in prepared.devices]
    assert devices == [("node", "gpu-1", ["gpu"]), ("node", "gpu-2", ["gpu"])]
    edits = cdi_devices(tmp_path)
    assert sorted(edits) == [name for device in prepared.devices for name in device.cdi_device_ids]
    env = edits[f"{NAME}/claim=u-2-gpu-2"]["env"]
    assert {f"CUDASIM_DEVICES={UUIDS[1]},{UUIDS[2]}", f"CUDASIM_NODE={GPUS_DIR}"} < set(env)
    nodes = [item["path"] for edit in edits.values() for item in edit["deviceNodes"]]
    assert nodes == ["/dev/gpu-1", "/dev/gpu-2"]
    assert kubelet.prepare(two="u-2")["u-2"] == prepared, "a repeated call must return the same"


def test_failed_claim_does_not_affect_others(api, kubelet, tmp_path):
    api.allocate("good", "u-1", "gpu-0")
    api.allocate("renewed", "u-3", "gpu-1")
    api.allocate("other", "u-4", "gpu-1", driver="else.example.com")
    results = kubelet.prepare(good="u-1", renewed="u-2", other="u-4")
    assert not results["u-1"].error
    assert "does not have uid u-2" in results["u-2"].error
    assert "has no devices" in results["u-4"].error
    assert len(cdi_devices(tmp_path)) == 1


def test_restarted_driver_removes_memory_of_a_deleted_claim(api, gpus, tmp_path):
    api.allocate("one", "u-1", "gpu-0")
    with KubeletPlugin(gpus, tmp_path):
        kubelet = Kubelet(tmp_path)
        kubelet.prepare(one="u-1")
    memory = gpus.gpus_of("u-1").path / "memory-0-1-0"
    memory.write_bytes(b"KV")
    second = GpuDriver(api, "node", 3, cdi=tmp_path / "cdi", state=tmp_path / "gpus")
    assert second.prepared() == {"u-1": [UUIDS[0]]}
    del api.objects[CLAIMS, "one"]  # the claim may be deleted before the kubelet's call
    with KubeletPlugin(second, tmp_path):
        for _ in range(2):
            assert not Kubelet(tmp_path).unprepare(one="u-1")["u-1"].error
    assert not second.prepared()
    assert not memory.exists()


def test_cuda_library_in_containers_is_loadable_and_read_only(api, kubelet, tmp_path):
    api.allocate("one", "u-1", "gpu-0")
    kubelet.prepare(one="u-1")
    (edits,) = cdi_devices(tmp_path).values()
    (library,) = [m for m in edits["mounts"] if m["containerPath"].endswith("-linux-gnu/libcuda.so.1")]
    assert library["options"][0] == "ro"
    # In a separate process, because the library makes the loading process see GPUs.
    load = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cuGetErrorName"
    subprocess.run([sys.executable, "-c", load, library["hostPath"]], check=True)
