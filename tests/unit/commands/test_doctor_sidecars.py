"""``doctor``: checks of engines, sidecars and Redis."""

import pytest

from lmcache_cli.commands.doctor.checks import run_checks
from lmcache_cli.commands.doctor.results import Level
from lmcache_cli.commands.gather import PodFigures
from lmcache_client.sglang.support import SUPPORTED_VERSIONS as SUPPORTED_SGLANG
from lmcache_client.vllm.support import SUPPORTED_VERSIONS
from lmcache_operator.api.engine_kinds import SGLANG, VLLM
from lmcache_store.common.text import plain
from tests.harness.commands.command_world import NOW, pod
from tests.harness.commands.doctor_world import (
    FORBIDDEN,
    KV_CONFIG,
    check_one,
    cluster_facts,
    engine,
    facts,
    figures,
    found_problems,
    remote,
    result_of,
    server,
    sglang,
    sglang_engines,
)

FAILURE, WARNING, UNKNOWN = Level.FAILURE, Level.WARNING, Level.UNKNOWN
REDIS = {"tiers": {"remote": {"external": {"url": "redis://redis.cache:6379"}}}}


def engines(version: str = "0.32.0", **cache: str) -> list[PodFigures]:
    report = {"version": version, "cache": {"block_size": "16", "enable_prefix_caching": "True"} | cache}
    return [PodFigures(pod(), report)]


@pytest.mark.parametrize(
    ("container", "level", "text"),
    [
        (engine("--prefix-caching-hash-algo=sha256"), WARNING, "is sha256, so keys are private"),
        (engine("--enforce-eager"), WARNING, "is not set, so keys are private"),
        (engine("--prefix-caching-hash-algo=sha256_cbor", "--no-enable-prefix-caching"), WARNING,
         "--no-enable-prefix-caching is set"),
        (engine(config=KV_CONFIG | {"kv_load_failure_policy": "fail"}), WARNING, "policy is fail"),
        (engine(config={"kv_connector": "x"}), WARNING, "kv_load_failure_policy is not set"),
        (engine(config=[]), FAILURE, "is not a JSON object"),
        (engine(env=()), WARNING, "PYTHONHASHSEED is not set"),
    ],
)  # fmt: skip
def test_argument_that_breaks_the_cache_is_found(container, level, text):
    check_one(cluster_facts(figures(container=container, clients=[])), "engineArguments", level, text)


def test_hash_seed_does_not_matter_where_keys_are_shared_already():
    assert found_problems(cluster_facts(figures(container=engine(env=())))) == []


@pytest.mark.parametrize(
    ("read", "check", "level", "text"),
    [
        (engines("0.28.1"), "engineVersion", FAILURE, "vLLM 0.28.1 is not supported"),
        (engines("0.34.0rc1"), "engineVersion", FAILURE, "vLLM 0.34.0rc1 is not supported"),
        ([PodFigures(pod(), problem="timeout")], "engineVersion", UNKNOWN, "demo-engine-0: timeout"),
        ([PodFigures(pod(), problem="forbidden: get x")], "engineVersion", UNKNOWN, '"get x"'),
        (engines(enable_prefix_caching="False"), "engineSettings", WARNING, "Prefix caching is off"),
        (engines(block_size="48"), "engineSettings", WARNING, "no multiple of the engine's block of 48"),
    ],
)
def test_engine_of_another_kind_is_found(read, check, level, text):
    check_one(cluster_facts(engines=read), check, level, text)


def test_healthy_sglang_engine_has_no_problem():
    healthy = cluster_facts(figures(container=sglang()), engines=sglang_engines())
    assert found_problems(healthy) == []
    assert result_of("engineVersion", healthy).statement == "The engines run SGLang 0.5.23."
    assert result_of("engineSettings", healthy).statement == "HiCache is on. A page has 64 tokens."


@pytest.mark.parametrize(
    ("container", "read", "check", "text"),
    [
        (sglang("--disable-radix-cache"), {}, "engineArguments", "--disable-radix-cache is set"),
        (sglang(backend="file"), {}, "engineArguments", "--hicache-storage-backend is file"),
        (sglang(config=[1]), {}, "engineArguments", "-extra-config is not a JSON object"),
        (sglang(config={"interface_v1": 0}), {}, "engineArguments", "interface_v1 is 0, but LMCache needs 1"),
        (sglang(), {"version": "0.5.22"}, "engineVersion", "SGLang 0.5.22 is not supported"),
        (sglang(), {"disable_radix_cache": "True"}, "engineSettings", "HiCache is off"),
        (sglang(), {"enable_hierarchical_cache": "False"}, "engineSettings", "HiCache is off"),
    ],
)
def test_wrong_arguments_version_or_settings_of_sglang_are_found(container, read, check, text):
    cluster = cluster_facts(figures(container=container), engines=sglang_engines(**read))
    check_one(cluster, check, FAILURE, text)


def test_supported_versions_are_those_of_the_connector_and_the_backend():
    first, last = SUPPORTED_VERSIONS[0], SUPPORTED_VERSIONS[-1]
    assert VLLM.versions == f"{first}-{last}"
    assert (SGLANG.versions,) == SUPPORTED_SGLANG
    assert found_problems(cluster_facts(engines=sglang_engines(f"{SGLANG.versions}.post1"))) == []


def test_private_keys_are_a_failure_only_with_lower_tiers():
    client = {"version": "0.1.0", "private_reason": "block hashes have a random seed", "is_attached": True}
    private = figures(clients=[client], remote={})
    check_one(cluster_facts(private), "privateKeys", WARNING, "block hashes have a random seed")
    for tiers in (REDIS, {"tiers": {"peers": {}}}):
        check_one(cluster_facts(private, **tiers), "privateKeys", FAILURE, "only the memory tier")


@pytest.mark.parametrize(
    ("changes", "check", "level", "text"),
    [
        ({"is_ready": False, "not_ready_reason": "bad URL"}, "sidecars", FAILURE, "not ready: bad URL"),
        ({"num_clients": {"attached": 0}, "clients": []}, "sidecars", FAILURE, "serves without the cache"),
        ({"attach_refusal": "stop those engines"}, "sidecars", FAILURE, "the cache: stop those engines."),
        ({"version": "0.0.9"}, "sidecarVersions", WARNING, "has version 0.1.0, and the sidecar 0.0.9"),
        ({"time": NOW + 8}, "podClocks", WARNING, "clock of the API server by more than 5 s"),
        ({"transfer": {"pin_problem": "no memory"}}, "pinnedMemory", WARNING, "copies are slow: no memory"),
        ({"remote": remote(is_reachable=False, off_reason="NOAUTH")}, "remoteReachable", FAILURE,
         "NOAUTH."),
        ({"remote": remote(server(problem="refused"))}, "remoteReachable", FAILURE, "cache:6379: refused"),
        ({"remote": remote(shards_problem="not YAML")}, "remoteReachable", WARNING, "of shards: not YAML"),
        ({"remote": remote(refused={"NOPERM": 3})}, "remoteRefusals", FAILURE, "lacks rights"),
        ({"remote": remote(refused={"OOM": 1})}, "remoteRefusals", FAILURE, "is full and evicts nothing"),
        ({"remote": remote(server(policy="noeviction"))}, "remoteSettings", FAILURE, "policy is noeviction"),
        ({"remote": remote(server(policy="volatile-lru"))}, "remoteSettings", FAILURE, "is volatile-lru"),
        ({"remote": remote(server(max_bytes=0))}, "remoteSettings", WARNING, "has no memory limit"),
        ({"remote": remote({"name": "a", "problem": ""})}, "remoteSettings", WARNING, "not let the sidecars"),
        ({"remote": remote(server(answer_seconds=0.2))}, "remoteLatency", WARNING, "up to 200 ms"),
        ({"peers": remote(server(problem="NO"))}, "peersReachable", WARNING,
         "from peer redis.cache:6379: NO"),
        ({"peers": remote(shards_problem="not YAML")}, "peersReachable", WARNING, "list of peers: not YAML"),
        ({"remote": remote(residence_seconds=90)}, "remoteEvictions", WARNING, "after about 90s"),
        ({"is_ready": False, "not_ready_reason": "\x1b[2J bad\nURL"}, "sidecars", FAILURE,
         "not ready: [2J bad URL."),
    ],
)  # fmt: skip
def test_problem_that_a_sidecar_reports_is_found(changes, check, level, text):
    check_one(cluster_facts(figures(**changes)), check, level, text)


NO_ADDRESS = "cannot resolve the host: Name or service not known"


@pytest.mark.parametrize(
    "part",
    [
        remote({"name": "kvv.cache.svc:6379", "problem": NO_ADDRESS}),
        remote(is_reachable=False, off_reason=f"remote tier kvv.cache.svc:6379: {NO_ADDRESS}"),
    ],
)
def test_server_without_an_address_has_one_problem_with_the_remedy_of_the_condition(part):
    cluster = cluster_facts(figures(remote=part), **REDIS)
    check_one(cluster, "remoteReachable", FAILURE, f"kvv.cache.svc:6379: {NO_ADDRESS}.")
    assert result_of("remoteReachable", cluster).remedy == (
        "Check the host in spec.tiers.remote.external.url: kubectl get service -n cache lists the Services."
    )
    assert "accepted" not in str(run_checks(facts(cluster))), "no server was asked"


def test_remedy_for_a_server_that_refuses_names_the_password():
    refusing = cluster_facts(figures(remote=remote(server(problem="WRONGPASS"))), **REDIS)
    assert "the password" in result_of("remoteReachable", refusing).remedy


@pytest.mark.parametrize("has_tls", [False, True])
def test_remedy_for_peers_names_certificates_only_with_tls(has_tls):
    tier = {"tls": {"issuerRef": {"name": "caches"}}} if has_tls else {}
    unreachable = figures(peers=remote(server(name="e-1:9465", problem="refused")))
    result = result_of("peersReachable", cluster_facts(unreachable, tiers={"peers": tier}))
    assert ("certificates" in result.remedy) == has_tls


ENCRYPTED = {"disk": {"size": "1Gi", "encryption": {"secretRef": {"name": "kv-keys"}}}}


@pytest.mark.parametrize("why", ["1 does not have 64 hexadecimal digits", "no key\x1b[31m"])
def test_keys_that_a_sidecar_cannot_use_are_found(why):
    fine, wrong = (
        figures(number, disk={"encryption_problem": problem}) for number, problem in enumerate((None, why))
    )
    result = result_of("encryptionKeys", cluster_facts(fine, wrong, tiers=ENCRYPTED))
    assert (result.level, result.runbook) == (FAILURE, "EncryptionKeysInvalid")
    assert f"has a problem with the keys of the disk tier: {plain(why)}" in result.statement
    assert "Secret kv-keys" in result.remedy
    assert found_problems(cluster_facts(fine, wrong)) == [], "no encryption is asked for"


@pytest.mark.parametrize("num_fine", [0, 1])
def test_sidecar_that_writes_plain_rows_is_found(num_fine):
    fine = [figures(number, disk={"encryption_problem": ""}) for number in range(num_fine)]
    assert found_problems(cluster_facts(*fine, figures(num_fine), tiers=ENCRYPTED)) == [], "it has no tier"
    cluster = cluster_facts(*fine, figures(num_fine, disk={"is_reachable": True}), tiers=ENCRYPTED)
    check_one(cluster, "encryptionKeys", FAILURE, "writes rows of the disk tier without encryption.")
    result = result_of("encryptionKeys", cluster)
    assert f"demo-engine-{num_fine}" in result.statement
    assert result.remedy.startswith("Replace the pod.")


@pytest.mark.parametrize("sidecar", ["sidecar", "lmcache-sidecar"])
def test_pod_with_the_keys_of_another_secret_is_found(sidecar):
    fine, wrong = (figures(0, disk={"encryption_problem": why}) for why in ("", "no key"))
    variable = {"name": "LMCACHE_DISK_ENCRYPTION_KEYS_DIR", "value": "/keys"}
    mount = {"name": "keys", "mountPath": "/keys"}
    container = {"name": sidecar, "env": [variable], "volumeMounts": [mount]}
    volume = {"name": "keys", "secret": {"secretName": "former"}}
    for each in (fine, wrong):
        each.pod["spec"] |= {"initContainers": [container], "volumes": [volume]}
    check_one(cluster_facts(fine, tiers=ENCRYPTED), "encryptionKeys", WARNING, "Secret former, not kv-keys")
    assert "Secret former" in result_of("encryptionKeys", cluster_facts(wrong, tiers=ENCRYPTED)).remedy


@pytest.mark.parametrize(
    ("check", "report", "statement"),
    [
        ("encryptionKeys", {"disk": {"encryption_problem": None}},
         "Sidecars that report no problem with their keys: 2."),
        ("peersReachable", {"peers": remote()}, "Sidecars that can read from all their peers: 2."),
    ],
)  # fmt: skip
def test_healthy_sidecars_are_counted(check, report, statement):
    cluster = cluster_facts(figures(**report), figures(1, **report), tiers=ENCRYPTED | {"peers": {}})
    assert result_of(check, cluster).statement == statement


def test_sidecar_that_may_not_be_read_is_unknown():
    forbidden = PodFigures(pod(containers=[engine()]), problem="forbidden: get pods/proxy")
    check_one(cluster_facts(forbidden), "sidecars", UNKNOWN, 'lacks the right "get pods/proxy"')
    check_one(cluster_facts(), "sidecars", UNKNOWN, "list things", cluster_pods=FORBIDDEN)


@pytest.mark.parametrize("reason", ["SidecarCannotCopy", "GPUNotShared"])
def test_engines_that_copy_although_sidecars_should_are_found(reason):
    cluster = cluster_facts()
    state = {"requested": "CudaIPC", "mode": "SharedMemory", "reason": reason, "message": "no driver"}
    cluster.resource["status"]["transfer"] = state
    check_one(cluster, "transfer", WARNING, "not the sidecars: no driver")
    state |= {"requested": "Auto", "reason": "GPUNotShared"}
    assert found_problems(cluster) == []


def test_sidecars_that_should_follow_the_operator_are_found():
    older = figures(version="0.0.9", clients=[])
    following = cluster_facts(older, images={"policy": "Follow"})
    check_one(following, "sidecarVersions", WARNING, "operator has version 0.1.0")
    assert found_problems(cluster_facts(older)) == []


def test_many_pods_take_one_line():
    servers = cluster_facts(shard_pods=[pod(0), pod(1, is_ready=False)])
    check_one(servers, "shards", FAILURE, "1 of 2 server pods are not ready: demo-engine-1")
    silent = [PodFigures(pod(number, containers=[engine()]), problem="no answer") for number in range(1000)]
    check_one(cluster_facts(*silent), "sidecars", WARNING, "1000 of 1000 pods: demo-engine-0, and 999 more")


@pytest.mark.parametrize("value", [None, 7, "text", [], {"a": {"b": []}}, [[]], True])
def test_report_of_a_hostile_sidecar_breaks_no_check(value):
    names = (*figures().stats, "transfer", "clients", "peers", "remote", "time", "version")
    hostile = [figures(**{name: value}) for name in names]
    hostile += [figures(remote=remote() | {name: value}) for name in remote()]
    for tier in ("peers", "remote"):
        hostile += [figures(**{tier: remote(server(**{name: value}))}) for name in server()]
    hostile += [figures(clients=[{"is_attached": True, "private_reason": value, "version": value}])]
    for each in hostile:
        assert run_checks(facts(cluster_facts(each)))
