"""Encryption of rows in lower tiers: the keys that a sidecar mounts, its options, and the condition. Pure.

The operator never reads the keys. Only the sidecar mounts them, and reports whether it can use them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lmcache_operator.api.tiers import Tiers
from lmcache_operator.components.base import Observed, Sidecar
from lmcache_operator.components.conditions import Condition
from lmcache_operator.pods.resize import named_sidecar
from lmcache_operator.specs import paths
from lmcache_operator.specs.merge import dig

OPTIONS = {
    "disk": "LMCACHE_DISK_ENCRYPTION_KEYS_DIR",
    "remote": "LMCACHE_REMOTE_ENCRYPTION_KEYS_DIR",
}
"""Variable of the sidecar with the directory of the keys, by tier.

These are variables and not keys of the shared file, because only pods that mount the keys may get them.
"""
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


def rows_encrypted(observed: Observed, sidecars: Sequence[Sidecar]) -> Condition | None:
    """Whether sidecars encrypt the rows of all tiers whose encryption the spec asks for.

    None: the spec asks for no encryption, or no sidecar reports on these tiers.
    """
    declared = dig(observed.resource, "spec", "tiers")
    secrets = {tier: dig(declared, tier, "encryption", "secretRef", "name") for tier in OPTIONS}
    wanted = {tier: str(secret) for tier, secret in secrets.items() if secret is not None}
    reporting = [sidecar for sidecar in sidecars if wanted.keys() & sidecar.encryption.keys()]
    if not reporting:
        return None
    encrypted = {pod["metadata"]["name"]: _encrypted_tiers(pod) for pod in observed.pods}
    problems: dict[str, str] = {}
    for sidecar in reporting:
        tiers = wanted.keys() & encrypted.get(sidecar.pod, set()) & sidecar.encryption.keys()
        for tier in sorted(tiers):
            if (why := sidecar.encryption[tier]) != "":
                where = f"pod {sidecar.pod}, {tier} tier, Secret {wanted[tier]}"
                problems.setdefault(sidecar.pod, f"{where}: {why or _NO_ENCRYPTION}")
    if problems:
        count = f"{len(problems)} of {len(reporting)} sidecars cannot encrypt rows as the spec asks"
        first = next(iter(problems.values()))
        return Condition("False", "EncryptionKeysInvalid", f"{count}. First: {first}")
    former = [sidecar.pod for sidecar in reporting if wanted.keys() - encrypted.get(sidecar.pod, set())]
    if former:
        message = f"{len(former)} of {len(reporting)} engine pods do not encrypt rows yet. First: {former[0]}"
        return Condition("False", "Replacing", message)
    message = f"All {len(reporting)} sidecars encrypt the rows of: {', '.join(wanted)}."
    return Condition("True", "Encrypted", message)


def _encrypted_tiers(pod: Any) -> set[str]:
    """Tiers of a pod for which its sidecar has keys to encrypt with."""
    variables = {item["name"] for item in named_sidecar(pod["spec"].get("initContainers")).get("env") or ()}
    return {tier for tier, variable in OPTIONS.items() if variable in variables}
