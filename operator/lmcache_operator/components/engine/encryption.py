"""Encryption of rows in lower tiers: the keys that a sidecar mounts, its options, and the condition. Pure.

The operator never reads the keys. Only the sidecar mounts them, and reports whether it can use them.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple

from lmcache_operator.api.tiers import Tiers
from lmcache_operator.contract.base import Observed, Sidecar
from lmcache_operator.contract.conditions import Condition, Reason
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig

OPTIONS = {
    "disk": "LMCACHE_DISK_ENCRYPTION_KEYS_DIR",
    "remote": "LMCACHE_REMOTE_ENCRYPTION_KEYS_DIR",
}
"""Variable of the sidecar with the directory of the keys, by tier.

These are variables and not keys of the shared file, because only pods that mount the keys may get them.
"""
_Secrets = Mapping[str, str]
"""Names of Secrets, by tier."""
_NO_ENCRYPTION = (
    "the image of the sidecar is of an earlier version, which does not encrypt. Set spec.images.policy to "
    "Follow, or spec.sidecar.image to a later image"
)


class KeyVolume(NamedTuple):
    """The volume of a Secret with keys."""

    name: str
    path: str
    """Mount path in the sidecar."""
    secret: str
    """Name of the Secret."""


def key_volumes(tiers: Tiers) -> Iterator[KeyVolume]:
    """A volume for each Secret with keys. Tiers with the same Secret share the volume."""
    secrets = tiers.key_secrets
    for secret in sorted(set(secrets.values())):
        users = "-".join(tier for tier, name in secrets.items() if name == secret)
        yield KeyVolume(f"{users}-keys", f"{paths.KEYS_DIR}/{users}", secret)


def key_options(tiers: Tiers) -> dict[str, str]:
    """Variables of the sidecar with the directories of keys; none without encryption."""
    directories = {volume.secret: volume.path for volume in key_volumes(tiers)}
    return {OPTIONS[tier]: directories[secret] for tier, secret in tiers.key_secrets.items()}


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


def rows_encrypted(observed: Observed, sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether sidecars encrypt the rows of all tiers whose encryption the spec asks for.

    None: the spec asks for no encryption, or no sidecar runs.
    """
    declared = dig(observed.resource, "spec", "tiers")
    secrets = {tier: dig(declared, tier, "encryption", "secretRef", "name") for tier in OPTIONS}
    wanted = {tier: str(secret) for tier, secret in secrets.items() if secret is not None}
    if not wanted or not sidecars:
        return None
    mounted = {str(pod["metadata"]["name"]): mounted_secrets(pod) for pod in observed.pods}
    return (
        _invalid(wanted, mounted, sidecars)
        or _replacing(wanted, mounted)
        or _unknown(wanted, sidecars)
        or Condition(
            "True", "Encrypted", f"All {len(sidecars)} sidecars encrypt the rows of: {', '.join(wanted)}."
        )
    )


def _invalid(
    wanted: _Secrets, mounted: Mapping[str, _Secrets], sidecars: Sequence[Sidecar]
) -> Condition | None:
    """The condition if a sidecar reports a problem with its keys. It names the pod's Secret."""
    problems: dict[str, str] = {}
    for sidecar in sidecars:
        secrets = mounted.get(sidecar.pod, {})
        for tier in sorted(wanted.keys() & secrets.keys() & sidecar.encryption.keys()):
            if (why := sidecar.encryption[tier]) != "":
                where = f"pod {sidecar.pod}, {tier} tier, Secret {secrets[tier]}"
                problems.setdefault(sidecar.pod, f"{where}: {why or _NO_ENCRYPTION}")
    if not problems:
        return None
    count = f"{len(problems)} of {len(sidecars)} sidecars have a problem with their keys"
    return Condition("False", "EncryptionKeysInvalid", f"{count}. First: {next(iter(problems.values()))}")


def _replacing(wanted: _Secrets, mounted: Mapping[str, _Secrets]) -> Condition | None:
    """The condition if pods lack keys, or have the keys of another Secret. They need not answer."""
    if bare := [pod for pod, secrets in mounted.items() if wanted.keys() - secrets.keys()]:
        message = f"{len(bare)} of {len(mounted)} engine pods do not encrypt rows yet. First: {bare[0]}"
        return Condition("False", "Replacing", message)
    former = {
        pod: f"pod {pod}, {tier} tier: Secret {secrets[tier]} instead of {secret}"
        for pod, secrets in mounted.items()
        for tier, secret in wanted.items()
        if secrets[tier] != secret
    }
    if not former:
        return None
    count = f"{len(former)} of {len(mounted)} engine pods encrypt rows with the keys of another Secret"
    return Condition("False", "Replacing", f"{count}. First: {next(iter(former.values()))}")


def _unknown(wanted: _Secrets, sidecars: Sequence[Sidecar]) -> Condition | None:
    """The condition if a sidecar does not report on a tier, such as one that does not answer."""
    silent = [sidecar for sidecar in sidecars if wanted.keys() - sidecar.encryption.keys()]
    if not silent:
        return None
    count = f"{len(silent)} of {len(sidecars)} sidecars do not report whether they encrypt rows"
    reason: Reason = "NotReported" if all(sidecar.answers for sidecar in silent) else "NoAnswer"
    message = f"{count}. First: pod {silent[0].pod}. See the condition SidecarAttached"
    return Condition("Unknown", reason, message)
