"""A cluster whose pods have disks. It needs a real kubelet.

The tests depend on their order, and share one pod.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.node.app import App
from testing.node.cluster import NodeCluster

STORAGE_CLASS = "disks"
PROMPT = list(range(4, 4 + 256)) * 8


@pytest.fixture(scope="module")
def volume(tmp_path_factory, installed) -> Iterator[Path]:
    """A file system of 1 GiB on the node that everyone may write to. Its storage class has no provisioner."""
    mounted = tmp_path_factory.mktemp("disk")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g,mode=0777", "tmpfs", mounted], check=True)
    options = {"provisioner": "kubernetes.io/no-provisioner", "volumeBindingMode": "WaitForFirstConsumer"}
    installed.api.create("storage.k8s.io/v1/storageclasses", {"metadata": {"name": STORAGE_CLASS}, **options})
    yield mounted
    subprocess.run(["umount", "-l", mounted], check=True)


@pytest.fixture(scope="module")
def app(make_app, volume) -> Iterator[App]:
    disk = {"size": "1Gi", "storageClassName": STORAGE_CLASS}
    app = make_app("disk", disk=disk)
    del app.spec["spec"]["tiers"]["remote"]
    app.apply()
    yield app
    app.delete()


def create_volume(node: NodeCluster, path: Path) -> None:
    spec = {
        "capacity": {"storage": "1Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": str(path)},
        "storageClassName": STORAGE_CLASS, "persistentVolumeReclaimPolicy": "Retain",
    }  # fmt: skip
    node.api.create("v1/persistentvolumes", {"metadata": {"name": "disk"}, "spec": spec})


def test_missing_volume_is_reported_in_the_status(app, volume):
    ready = app.wait_condition("Ready", "False")
    app.node.wait(lambda: app.conditions()["Ready"]["reason"] in ("Unschedulable", "FailedBinding"), 120)
    assert "volume" in app.wait_condition("Degraded")["message"], ready
    create_volume(app.node, volume)
    pod = app.ready_pod()
    claim = app.node.api.get("v1/persistentvolumeclaims", f"{pod.name}-disk", pod.namespace)
    assert (claim["status"]["phase"], claim["spec"]["volumeName"]) == ("Bound", "disk")


def test_computed_rows_are_written_to_the_disk(app):
    pod = app.ready_pod()
    pod.complete(PROMPT)
    app.node.wait(lambda: pod.stats()["disk"]["written"] >= len(PROMPT) // 256, 120)
    assert app.wait_condition("SidecarAttached")["reason"] == "Attached"
    assert app.wait_condition("DiskTierAvailable")["reason"] == "Available"
