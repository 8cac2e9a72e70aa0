"""Devices that exist only as API objects: enough for a real scheduler to allocate them to claims."""

import contextlib
from collections.abc import Iterator

from testing.kube.cluster import Cluster

DEVICE_CLASS = "gpu.test"
CLASSES, SLICES = "resource.k8s.io/v1/deviceclasses", "resource.k8s.io/v1/resourceslices"


@contextlib.contextmanager
def published(plane: Cluster, per_node: int, device_class: str = DEVICE_CLASS) -> Iterator[None]:
    """Publish ``per_node`` devices on each node and a class for them, as a DRA driver does."""
    selector = {"cel": {"expression": f'device.driver == "{device_class}"'}}
    plane.api.create(CLASSES, {"metadata": {"name": device_class}, "spec": {"selectors": [selector]}})
    slices = []
    for node in (obj["metadata"]["name"] for obj in plane.api.objects("v1/nodes")):
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        devices = [{"name": f"gpu-{number}"} for number in range(per_node)]
        spec = {"driver": device_class, "nodeName": node, "pool": pool, "devices": devices}
        slices.append(f"{node}-gpus")
        plane.api.create(SLICES, {"metadata": {"name": slices[-1]}, "spec": spec})
    yield
    plane.api.delete(CLASSES, device_class)
    for name in slices:
        plane.api.delete(SLICES, name)
