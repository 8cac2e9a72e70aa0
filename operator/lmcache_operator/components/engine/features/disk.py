"""The disk tier: a volume of the pod, the sidecar's options, and the condition. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Final

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import DiskTierSpec
from lmcache_operator.components.engine.features.base import LowerTierFeature, Volume
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of
from lmcache_operator.pods.resize import env_of_sidecar
from lmcache_operator.specs import Object, paths
from lmcache_store.common.units import format_mebibytes

_SIZE: Final = "LMCACHE_DISK_SIZE"


class DiskFeature(LowerTierFeature):
    """The disk tier of an engine pod."""

    name = "disk"
    condition_type = "DiskTierAvailable"
    reserved: ClassVar[Mapping[str, str]] = {"LMCACHE_DISK_": "tiers.disk"}

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """A changed size reaches a pod at its next replacement."""
        settings["tiers"].get("disk", {}).pop("size", None)

    def env(self, cluster: Cluster) -> dict[str, str]:
        """Path and size of this pod's own volume."""
        disk = cluster.spec.tiers.disk
        return {"LMCACHE_DISK_PATH": paths.DISK_DIR, _SIZE: f"{disk.num_bytes}"} if disk else {}

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """A volume that is created and deleted with the pod."""
        if disk := cluster.spec.tiers.disk:
            yield Volume("disk", paths.DISK_DIR, _ephemeral_volume(disk))

    def has_former_size(self, pod: Object, template: Object) -> bool:
        """Whether the size in the sidecar's environment differs from the template's."""
        return env_of_sidecar(pod).get(_SIZE) != env_of_sidecar(template).get(_SIZE)

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether all disk tiers are in use; None: no sidecar has one."""
        number = sum(map(self.is_present, sidecars))
        message = f"All {number} disk tiers are in use."
        failure = failure_of("DiskTierOff", "disk tiers are off", self.lost(sidecars), number)
        return failure or (Condition("True", "Available", message) if number else None)


def _ephemeral_volume(disk: DiskTierSpec) -> Object:
    """A generic ephemeral volume: created for the pod, and deleted with it."""
    claim: Object = {"accessModes": ["ReadWriteOnce"]}
    claim["resources"] = {"requests": {"storage": format_mebibytes(disk.volume_bytes)}}
    if disk.storage_class_name is not None:
        claim["storageClassName"] = disk.storage_class_name
    return {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
