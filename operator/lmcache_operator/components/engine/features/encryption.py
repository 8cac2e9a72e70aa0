"""Encryption of rows in lower tiers: the keys that a sidecar mounts, its options, and the condition. Pure.

The operator never reads the keys. Only the sidecar mounts them, and reports whether it can use them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.tiers import Tiers
from lmcache_operator.components.engine.features.base import PodFeature, Volume, part_of
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, Reason, failure_of, silence_of
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain

OPTIONS = {"disk": "LMCACHE_DISK_ENCRYPTION_KEYS_DIR", "remote": "LMCACHE_REMOTE_ENCRYPTION_KEYS_DIR"}
"""Variable of the sidecar with the directory of the keys, by tier.

These are variables and not keys of the shared file, because only pods that mount the keys may get them.
"""
_Secrets = Mapping[str, str]
"""Names of Secrets, by tier."""
_NO_ENCRYPTION = (
    "the image of the sidecar is of an earlier version, which does not encrypt. Set spec.images.policy to "
    "Follow, or spec.sidecar.image to a later image"
)


_Problems = Mapping[str, str | None]
"""Problem of the encryption of each lower tier that a sidecar has, by tier. Empty text: no problem. None: the
sidecar has an earlier version, which does not encrypt."""


class Encryption(PodFeature[_Problems]):
    """Encryption of the rows that an engine pod writes to lower tiers."""

    name = "encryption"
    condition_type = "RowsEncrypted"
    reserved: ClassVar[Mapping[str, str]] = {OPTIONS["remote"]: "tiers.remote.encryption"}
    absent: _Problems = MappingProxyType({})

    def env(self, cluster: Cluster) -> dict[str, str]:
        """Variables of the sidecar with the directories of keys; none without encryption."""
        secrets = cluster.spec.tiers.key_secrets
        users = _users(cluster.spec.tiers)
        return {OPTIONS[tier]: f"{paths.KEYS_DIR}/{users[secret]}" for tier, secret in secrets.items()}

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """A volume for each Secret with keys. The mounts have no subPath, or they would get no changes."""
        for secret, users in _users(cluster.spec.tiers).items():
            source = {"secret": {"optional": True, "secretName": secret}}
            yield Volume(f"{users}-keys", f"{paths.KEYS_DIR}/{users}", source)

    def read(self, stats: Mapping[str, Any]) -> _Problems:
        """Parse the part of ``/stats`` about each lower tier."""
        parts = {tier: part for tier in OPTIONS if (part := part_of(stats, tier))}
        return {tier: _problem(part) for tier, part in parts.items()}

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether sidecars encrypt the rows of all tiers whose encryption the spec asks for.

        None: the spec asks for no encryption, or no sidecar runs.
        """
        declared = dig(observed.resource, "spec", "tiers")
        secrets = {tier: dig(declared, tier, "encryption", "secretRef", "name") for tier in OPTIONS}
        wanted = {tier: str(secret) for tier, secret in secrets.items() if secret is not None}
        if not wanted or not sidecars:
            return None
        mounted = {str(pod["metadata"]["name"]): mounted_secrets(pod) for pod in observed.pods}
        reports = [(sidecar, self.report(sidecar)) for sidecar in sidecars]
        silent = [sidecar.pod for sidecar, report in reports if wanted.keys() - report.keys()]
        is_mute = any(not sidecar.answers for sidecar in sidecars if sidecar.pod in silent)
        reason: Reason = "NoAnswer" if is_mute else "NotReported"
        problem = "sidecars do not report whether they encrypt rows"
        message = f"All {len(sidecars)} sidecars encrypt the rows of: {', '.join(wanted)}."
        return (
            _invalid(wanted, mounted, reports)
            or _replacing(wanted, mounted)
            or silence_of(reason, problem, silent, len(sidecars))
            or Condition("True", "Encrypted", message)
        )


def _users(tiers: Tiers) -> dict[str, str]:
    """Tiers that use a Secret with keys, joined by hyphens, by Secret. They share its volume."""
    secrets = tiers.key_secrets
    return {
        secret: "-".join(tier for tier, name in secrets.items() if name == secret)
        for secret in sorted(set(secrets.values()))
    }


def _problem(part: Mapping[str, Any]) -> str | None:
    return plain(part["encryption_problem"]) if "encryption_problem" in part else None


def mounted_secrets(pod: Object, sidecar_names: Container[str] = (names.SIDECAR,)) -> dict[str, str]:
    """Name of the Secret from which a pod's sidecar gets the keys of each tier that it encrypts.

    Empty text: the variable of the tier is set, but leads to no Secret.
    """
    spec = pod["spec"]
    volumes = {item["name"]: dig(item, "secret", "secretName") for item in spec.get("volumes") or ()}
    secrets: dict[str, str] = {}
    for container in spec.get("initContainers") or ():
        if container["name"] in sidecar_names:
            mounts = {item["mountPath"]: item["name"] for item in container.get("volumeMounts") or ()}
            paths_by_name = {item["name"]: item.get("value") for item in container.get("env") or ()}
            secrets |= {
                tier: volumes.get(mounts.get(paths_by_name[variable], "")) or ""
                for tier, variable in OPTIONS.items()
                if variable in paths_by_name
            }
    return secrets


_Reports = Sequence[tuple[SidecarState, _Problems]]


def _invalid(wanted: _Secrets, mounted: Mapping[str, _Secrets], reports: _Reports) -> Condition | None:
    """The condition if a sidecar reports a problem with its keys. It names the pod's Secret."""
    problems: dict[str, str] = {}
    for sidecar, report in reports:
        secrets = mounted.get(sidecar.pod, {})
        for tier in sorted(wanted.keys() & secrets.keys() & report.keys()):
            if (why := report[tier]) != "":
                where = f"{tier} tier, Secret {secrets[tier]}"
                problems.setdefault(sidecar.pod, f"{where}: {why or _NO_ENCRYPTION}")
    problem = "sidecars have a problem with their keys"
    return failure_of("EncryptionKeysInvalid", problem, [*problems.items()], len(reports))


def _replacing(wanted: _Secrets, mounted: Mapping[str, _Secrets]) -> Condition | None:
    """The condition if pods lack keys, or have the keys of another Secret. They need not answer."""
    unencrypted = [(pod, "") for pod, secrets in mounted.items() if wanted.keys() - secrets.keys()]
    former = {
        pod: f"{tier} tier: Secret {secrets[tier]} instead of {secret}"
        for pod, secrets in mounted.items()
        for tier, secret in wanted.items()
        if not unencrypted and secrets[tier] != secret
    }
    problem = "engine pods encrypt rows with the keys of another Secret"
    return failure_of(
        "Replacing", "engine pods do not encrypt rows yet", unencrypted, len(mounted)
    ) or failure_of("Replacing", problem, [*former.items()], len(mounted))
