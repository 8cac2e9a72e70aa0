"""Encryption of rows: Secrets that only sidecars mount, the sidecar's options, and the condition."""

from typing import Any

import pytest

from lmcache_operator.api.parse import parse
from lmcache_operator.components.engine.features.encryption import mounted_secrets
from lmcache_operator.components.injection.injection import Injection
from lmcache_operator.errors import InvalidSpecError, RefusedError
from tests.harness.fences import difference, output
from tests.harness.operator.components import GOOD, ReconciledCluster
from tests.harness.operator.injection import injected
from tests.harness.operator.injection import pod as user_pod
from tests.harness.operator.model import cluster
from tests.harness.operator.render import child_of, container, env_of, part, pod_of

DISK, REMOTE = "LMCACHE_DISK_ENCRYPTION_KEYS_DIR", "LMCACHE_REMOTE_ENCRYPTION_KEYS_DIR"
EXTERNAL = {"external": {"url": "redis://kv:6379"}}
MANAGED = {"managed": {"memoryPerShard": "1Gi"}}
REMOTES = [EXTERNAL, MANAGED, {"clusterRef": {"name": "kv"}}]


def encrypted(secret: str = "kv-keys", **tier: Any) -> dict[str, Any]:
    return tier | {"encryption": {"secretRef": {"name": secret}}}


def both(disk: str = "kv-keys", remote: str = "kv-keys") -> dict[str, Any]:
    return {"disk": encrypted(disk, size="1Gi"), "remote": encrypted(remote, **EXTERNAL)}


def keys_of(spec: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Secrets that the sidecar of a pod gets its keys from, by variable, as the kubelet mounts them."""
    sidecar, secrets = container(spec, f"{prefix}sidecar"), {}
    mounts = {mount["mountPath"]: mount for mount in sidecar["volumeMounts"]}
    for name, value in env_of(sidecar).items():
        if "ENCRYPTION" in name:
            assert "subPath" not in mounts[value], "such a mount gets no changes"
            source = part(spec["volumes"], mounts[value]["name"])["secret"]
            assert source == {"secretName": source["secretName"], "optional": True}, "pods start without it"
            secrets[name] = source["secretName"]
    return secrets


def secrets_in(spec: dict[str, Any], name: str) -> set[str]:
    """Secrets that any mount of a container leads to."""
    names = {mount["name"] for mount in container(spec, name)["volumeMounts"]}
    return {v["secret"]["secretName"] for v in spec["volumes"] if v["name"] in names and "secret" in v}


@pytest.mark.parametrize("kind", ["vLLM", "SGLang"])
@pytest.mark.parametrize("remote", REMOTES, ids=lambda remote: next(iter(remote)))
def test_sidecar_alone_gets_the_keys(remote: dict[str, Any], kind: str) -> None:
    tiers = {"disk": encrypted("disk-secret", size="1Gi"), "remote": encrypted("remote-secret", **remote)}
    spec = pod_of(tiers=tiers, engine={"kind": kind})
    assert keys_of(spec) == {DISK: "disk-secret", REMOTE: "remote-secret"}
    for name in ("engine", "payload"):
        assert not secrets_in(spec, name) & {"disk-secret", "remote-secret"}
    assert "ENCRYPTION" not in str(spec["containers"])


def test_tiers_with_the_same_secret_share_one_volume() -> None:
    spec = pod_of(tiers=both())
    assert keys_of(spec) == {DISK: "kv-keys", REMOTE: "kv-keys"}
    assert str(spec["volumes"]).count("kv-keys") == 1


def test_injected_sidecar_alone_gets_the_keys() -> None:
    spec = injected(user_pod(), tiers=both("d", "r"))[0]["spec"]
    profile = child_of("LMCacheProfile", Injection(), tiers=both("d", "r"))["template"]["spec"]
    assert keys_of(spec, "lmcache-") == keys_of(profile, "lmcache-") == {DISK: "d", REMOTE: "r"}
    for name in ("vllm", "lmcache-payload"):
        assert not secrets_in(spec, name)


@pytest.mark.parametrize(
    ("tiers", "path", "sentence"),
    [
        ({"disk": {"size": "1Gi", "encryption": {}}}, "disk.encryption.secretRef", "is required"),
        ({"remote": {**EXTERNAL, "encryption": {}}}, "remote.encryption.secretRef", "is required"),
        ({"remote": encrypted()}, "remote", "exactly one of managed, external and clusterRef must be set"),
        ({"disk": encrypted()}, "disk.size", "is required"),
        *(
            ({"disk": encrypted(name, size="1Gi")}, "disk.encryption.secretRef.name", "must be the name of a")
            for name in ("Keys", "a_b", "-a", "a-", "", "a/b", "../a", "kv\n", "a b")
        ),
        ({"disk": encrypted("a" * 254, size="1Gi")}, "disk.encryption.secretRef.name", "is too long"),
        (
            {"disk": {"size": "1Gi", "encryption": {"secretRef": {"name": "a", "key": "b"}}}},
            "disk.encryption.secretRef.key",
            "is not a known field",
        ),
    ],
)
def test_wrong_encryption_is_refused(tiers: dict[str, Any], path: str, sentence: str) -> None:
    with pytest.raises(InvalidSpecError, match=sentence) as caught:
        parse(cluster(tiers=tiers))
    assert caught.value.path == f"spec.tiers.{path}"


# -- the reconciled cluster

FINE = {"is_reachable": True, "off_reason": "", "encryption_problem": None}
WRONG = "key version 3: 63 characters, not 64 hexadecimal digits"


class Rig(ReconciledCluster):
    """Two engine pods whose sidecars report these lower tiers."""

    def __init__(self, tiers: dict[str, Any]) -> None:
        super().__init__(engine={"replicas": 2}, tiers=tiers)
        for call in ("get Secret", "find Secret"):
            self.world.failures[call] = RefusedError(call, "the operator must not read Secrets")
        self.settle()

    def report(self, *reports: dict[str, Any]) -> tuple[str, str]:
        """Let the sidecars report these lower tiers, reconcile, and return the condition."""
        self.answer(*(GOOD | lower for lower in reports))
        self.run()
        return self.encrypted

    @property
    def encrypted(self) -> tuple[str, str]:
        return self.condition("RowsEncrypted")

    @property
    def text(self) -> str:
        return self.message("RowsEncrypted")


ENCRYPTED, REPLACING, NO_KEYS = ("True", "Encrypted"), ("False", "Replacing"), ("", "")
INVALID, SILENT = ("False", "EncryptionKeysInvalid"), ("Unknown", "NoAnswer")
BOTH_FINE = {"disk": FINE, "remote": FINE}


def test_no_secret_is_read_or_written() -> None:
    rig = Rig(both())
    rig.report(BOTH_FINE, BOTH_FINE)
    writes = rig.change(tiers=both("other", "other"))
    assert {w for w in writes if "Secret" in w} == set()
    assert {ref.kind for ref in rig.world.objects} & {"Secret"} == set()
    for pod in rig.world.pods.values():
        assert keys_of(pod["spec"]) == {DISK: "other", REMOTE: "other"}


def problem(tier: str, why: Any = WRONG) -> dict[str, Any]:
    """The report of a sidecar that cannot use the keys of a tier."""
    return BOTH_FINE | {tier: FINE | {"encryption_problem": why}}


FIRST_OF_TWO = "1 of 2 sidecars have a problem with their keys. First: pod demo-engine"
NOT_SAID = "sidecars do not report whether they encrypt rows. First: pod demo-engine"
EARLIER = {"is_reachable": True, "off_reason": ""}
REPORTS = [
    ([BOTH_FINE, BOTH_FINE], ENCRYPTED, "All 2 sidecars encrypt the rows of: disk, remote."),
    ([BOTH_FINE, problem("disk")], INVALID, f"{FIRST_OF_TWO}-1: disk tier, Secret d: {WRONG}"),
    ([BOTH_FINE, problem("remote")], INVALID, f"{FIRST_OF_TWO}-1: remote tier, Secret r: {WRONG}"),
    ([BOTH_FINE, dict.fromkeys(BOTH_FINE, EARLIER)], INVALID, "does not encrypt. Set spec.images.policy"),
    ([BOTH_FINE, {"disk": FINE}], ("Unknown", "NotReported"), f"1 of 2 {NOT_SAID}-1. See"),
    ([BOTH_FINE, None], SILENT, f"1 of 2 {NOT_SAID}-1. See"),
    ([None, None], SILENT, f"2 of 2 {NOT_SAID}-0. See"),
    *(
        ([problem("disk", odd) | {"remote": "x"}, {"remote": []}], ("Unknown", "NotReported"), NOT_SAID)
        for odd in ([WRONG], 5, {"a": 1}, "")
    ),
    ([BOTH_FINE, problem("disk", "\x1b[31m" + "x" * 5000)], INVALID, FIRST_OF_TWO),
]


@pytest.mark.parametrize(("reports", "expected", "text"), REPORTS)
def test_reports_of_sidecars_become_a_condition(reports: Any, expected: tuple[str, str], text: str) -> None:
    rig = Rig(both("d", "r"))
    assert rig.encrypted == NO_KEYS
    rig.answer(*(each if each is None else GOOD | each for each in reports))
    rig.miss_answers()
    assert (rig.encrypted, text in rig.text) == (expected, True)
    assert (rig.text.isprintable(), len(rig.text) < 900) == (True, True)
    is_degraded = expected == INVALID
    assert rig.condition("Degraded") == (str(is_degraded), expected[1] if is_degraded else "AsDeclared")
    assert rig.condition("Ready") == ("True", "Ready"), "engines serve"
    assert (("Warning", "EncryptionKeysInvalid") in rig.world.events) == is_degraded
    assert rig.text in rig.message("Degraded") or not is_degraded
    assert rig.run() == []
    rig.seconds += 61  # so that silent sidecars are probed again
    assert rig.report(BOTH_FINE, BOTH_FINE) == ENCRYPTED
    assert (("Normal", "Encrypted") in rig.world.events) == (expected[0] == "False")


def test_pods_from_before_the_encryption_are_not_said_to_encrypt() -> None:
    rig = Rig({"remote": EXTERNAL})
    assert rig.report({"remote": FINE}, {"remote": FINE}) == NO_KEYS
    rig.world.change(tiers={"remote": encrypted(**EXTERNAL)})
    rig.run()
    assert (rig.encrypted, rig.condition("Degraded")) == (REPLACING, ("False", "AsDeclared"))
    assert rig.text == "2 of 2 engine pods do not encrypt rows yet. First: pod demo-engine-0."
    rig.settle()
    assert rig.report({"remote": FINE}, {"remote": FINE}) == ENCRYPTED
    rig.change(tiers={"remote": {"encryption": None}})
    assert rig.report({"remote": FINE}, {"remote": FINE}) == NO_KEYS


def test_pods_with_the_former_secret_are_being_replaced() -> None:
    rig = Rig({"remote": encrypted("former", **EXTERNAL)})
    rig.report({"remote": FINE}, {"remote": FINE})
    rig.world.change(tiers={"remote": encrypted("new", **EXTERNAL)})
    rig.run()
    assert rig.encrypted == REPLACING
    count = "2 of 2 engine pods encrypt rows with the keys of another Secret"
    assert rig.text == f"{count}. First: pod demo-engine-0: remote tier: Secret former instead of new."
    assert rig.report({"remote": FINE | {"encryption_problem": WRONG}}, {"remote": FINE}) == INVALID
    assert f"pod demo-engine-0: remote tier, Secret former: {WRONG}" in rig.text
    rig.settle()
    assert rig.report({"remote": FINE}, {"remote": FINE}) == ENCRYPTED


@pytest.mark.parametrize("value", [None, "/elsewhere"])
def test_variable_without_a_secret_is_not_said_to_encrypt(value: str | None) -> None:
    spec = pod_of(tiers=both())
    assert mounted_secrets({"spec": spec}) == {"disk": "kv-keys", "remote": "kv-keys"}
    part(container(spec, "sidecar")["env"], DISK)["value"] = value
    assert mounted_secrets({"spec": spec}) == {"disk": "", "remote": "kv-keys"}
    assert mounted_secrets({"spec": {"containers": []}}) == {}


def test_pages_show_the_messages_of_healthy_sidecars() -> None:
    rig = Rig({"remote": encrypted(**EXTERNAL)})
    assert rig.report({"remote": FINE}, {"remote": FINE}) == ENCRYPTED
    pages = {
        "SidecarAttached": "see-whether-the-cache-helps",
        "RemoteTierReachable": "rotate-a-password",
        "RowsEncrypted": "encrypt-rows",
    }
    for kind, page in pages.items():
        *_, shown = output(f"how-to/{page}.md", f'"{kind}"').splitlines()
        assert not difference(shown, rig.message(kind))
