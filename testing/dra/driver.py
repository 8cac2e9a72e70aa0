"""Simulated GPUs of a node, published to the scheduler and added to the containers of claims.

Only a claim's containers see its GPUs: the simulated CUDA driver in place of NVIDIA's, a device file for each
GPU, and a folder with the GPUs' memory. The state of a claim is one CDI file, so that a restarted driver
knows it, too.
"""

from __future__ import annotations

import json
import platform
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from testing import cuda
from testing.dra import kubelet_pb2 as pb
from testing.dra.plugin import DriverError

NAME = "gpu.lmcache.test"
"""Name of the driver and of its DeviceClass."""
CLAIMS = "resource.k8s.io/v1/resourceclaims"
CLASSES, SLICES = "resource.k8s.io/v1/deviceclasses", "resource.k8s.io/v1/resourceslices"
MEMORY_BYTES = 2 << 30
GPUS_DIR = "/dev/cudasim"
"""Path in containers of the folder with the memory of their GPUs."""
_LIBRARY = f"/usr/lib/{platform.machine()}-linux-gnu/libcuda.so.1"
_CDI_VERSION = "0.6.0"


class Api(Protocol):
    """The parts of ``testing.kube.api.Api`` that a driver uses."""

    def get(self, kind: str, name: str, namespace: str | None = None) -> Any: ...

    def apply(self, kind: str, obj: dict[str, Any], namespace: str | None = None) -> Any: ...

    def delete(self, kind: str, name: str, namespace: str | None = None) -> None: ...


def gpu_uuid(node: str, device: str) -> str:
    """The uuid of a device, which is the same after each start."""
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{device}.{node}')}"


class GpuDriver:
    """The driver that the module describes. Its ``num_gpus`` devices are named ``gpu-0`` and so on."""

    name = NAME

    def __init__(self, api: Api, node: str, num_gpus: int, *, cdi: Path, state: Path) -> None:
        """``cdi`` is a folder from which the container runtime reads CDI files. ``state`` holds the memory of
        the GPUs, and is best on a tmpfs.
        """
        self.api, self.node, self.num_gpus = api, node, num_gpus
        self._cdi, self._state = cdi, state
        for folder in (cdi, state):
            folder.mkdir(parents=True, exist_ok=True)

    # ---- for the scheduler ----

    def registered(self) -> None:
        selector = {"cel": {"expression": f'device.driver == "{NAME}"'}}
        self.api.apply(
            CLASSES,
            {
                "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": NAME},
                "spec": {"selectors": [selector]},
            },
        )  # fmt: skip
        # When a kubelet starts, it deletes the slices of drivers that do not register again.
        self.api.apply(SLICES, self._slice())

    def retire(self) -> None:
        """Remove all devices from the scheduler."""
        self.api.delete(SLICES, self._slice()["metadata"]["name"])
        self.api.delete(CLASSES, NAME)

    def _slice(self) -> dict[str, Any]:
        devices = [
            {
                "name": f"gpu-{number}",
                "attributes": {"uuid": {"string": gpu_uuid(self.node, f"gpu-{number}")}},
                "capacity": {"memory": {"value": str(MEMORY_BYTES)}},
            }
            for number in range(self.num_gpus)
        ]
        pool = {"name": self.node, "generation": 1, "resourceSliceCount": 1}
        return {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            "metadata": {"name": f"{self.node}-{NAME}"},
            "spec": {"driver": NAME, "nodeName": self.node, "pool": pool, "devices": devices},
        }

    # ---- for containers ----

    def gpus_of(self, claim_uid: str) -> cuda.Node:
        """The GPUs of a prepared claim, to read their counters and to order faults."""
        return cuda.Node(self._state / claim_uid)

    def prepared(self) -> dict[str, list[str]]:
        """UUIDs of the GPUs of each prepared claim."""
        uuids = {}
        for file in self._cdi.glob(f"{NAME}-claim_*.json"):
            (env,) = (v for v in json.loads(file.read_text())["containerEdits"]["env"] if "_DEVICES=" in v)
            uuids[file.stem.partition("_")[2]] = env.partition("=")[2].split(",")
        return uuids

    def prepare(self, namespace: str, name: str, uid: str) -> list[pb.Device]:
        claim = self.api.get(CLAIMS, name, namespace)
        if claim["metadata"]["uid"] != uid:
            raise DriverError(f"claim {namespace}/{name} does not have uid {uid}")
        allocation = claim.get("status", {}).get("allocation", {}).get("devices", {})
        results = [result for result in allocation.get("results", ()) if result["driver"] == NAME]
        if not results:
            raise DriverError(f"claim {namespace}/{name} has no devices of {NAME}")
        if not self._file(uid).exists():
            memory = self._state / uid
            memory.mkdir(exist_ok=True)
            memory.chmod(0o777)  # pods run as any user, and any container may write first
            self._write(uid, [result["device"] for result in results], memory)
        return [
            pb.Device(
                request_names=[result["request"]],
                pool_name=result["pool"],
                device_name=result["device"],
                cdi_device_ids=[f"{NAME}/claim={uid}-{result['device']}"],
            )
            for result in results
        ]

    def unprepare(self, uid: str) -> None:
        self._file(uid).unlink(missing_ok=True)
        shutil.rmtree(self._state / uid, ignore_errors=True)

    def _file(self, uid: str) -> Path:
        return self._cdi / f"{NAME}-claim_{uid}.json"

    def _write(self, uid: str, devices: Sequence[str], memory: Path) -> None:
        uuids = [gpu_uuid(self.node, device) for device in devices]
        variables = {
            "CUDASIM_NODE": GPUS_DIR, "CUDASIM_DEVICES": ",".join(uuids), "CUDASIM_MEMORY": MEMORY_BYTES,
        }  # fmt: skip
        mounts = {GPUS_DIR: (memory, "rw"), _LIBRARY: (cuda.build() / "libcuda.so.1", "ro")}
        spec = {
            "cdiVersion": _CDI_VERSION,
            "kind": f"{NAME}/claim",
            # The edits cover all devices together, because two variables of one name would be merged.
            "containerEdits": {
                "env": [f"{key}={value}" for key, value in variables.items()],
                "mounts": [
                    {"hostPath": str(path), "containerPath": inside, "options": [mode, "nosuid", "bind"]}
                    for inside, (path, mode) in mounts.items()
                ],
            },
            "devices": [
                {
                    "name": f"{uid}-{device}",
                    "containerEdits": {"deviceNodes": [{"path": f"/dev/{device}", "hostPath": "/dev/null"}]},
                }
                for device in devices
            ],
        }
        new_file = self._file(uid).with_suffix(".tmp")
        new_file.write_text(json.dumps(spec))
        new_file.rename(self._file(uid))
