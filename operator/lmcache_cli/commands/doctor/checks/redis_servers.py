"""Checks of the remote tier: Redis or Valkey servers, as the sidecars see them. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, first_of, grouped, ok, warning
from lmcache_cli.commands.gather import PodFigures, objects_in
from lmcache_operator import DOCS
from lmcache_operator.components.engine.features.remote import host_remedy
from lmcache_operator.pods.pods import is_ready
from lmcache_store.common.text import plain
from lmcache_store.common.units import format_seconds, format_size
from lmcache_store.explain import merge

_MAX_SERVERS = 64
_SLOW_SECONDS = 0.05
"""Time of an answer beyond which loads from the tier hardly ever arrive before the engine has computed."""
_SHORT_SECONDS = 600.0
"""Residence below which most conversations end up evicted between two turns."""
_FIRST_CHECK_SECONDS = 60.0
"""Time within which a sidecar has asked the servers for INFO."""
_GUIDE = f"{DOCS}/guides/sidecar.md#redis"
_REFUSALS: Mapping[str, tuple[str, str]] = {
    "NOPERM": (
        "The Redis user lacks rights, so it refuses rows",
        "Grant the user ~lmc1:* +hset +hget +hmget +hexists +unlink +ping +info"
        " +zadd +zremrangebyrank +expire +zrevrangebyscore.",
    ),
    "OOM": (
        "Redis is full and evicts nothing, so it refuses rows",
        "Set maxmemory-policy allkeys-lru in Redis.",
    ),
    "READONLY": ("The server is a read-only replica", "Name the master, or Sentinel, in the URL."),
    "MISCONF": ("Redis cannot save its data to disk", "Turn off persistence: set save to an empty string."),
    "NOREPLICAS": ("Redis lacks the replicas that it requires", "Set min-replicas-to-write 0."),
}
"""Errors of Redis for writes, each with the problem and the remedy."""


def parts_of(cluster: ClusterFacts, tier: str) -> dict[str, Mapping[str, Any]]:
    """Return the part of a tier in /stats, by pod."""
    parts = {figures.name: merge.part(figures.stats, tier) for figures in cluster.pods}
    return {pod: part for pod, part in parts.items() if part}


def reachable(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the sidecars reach the servers."""
    remotes = parts_of(cluster, "remote")
    problems = []
    for pod, remote in remotes.items():
        if remote.get("is_reachable") is not True:
            reason = plain(remote.get("off_reason")) or "unavailable"
            text = f"The sidecar cannot reach the remote tier: {reason}."
            problems.append((pod, _unreachable(cluster, text)))
        else:
            for server in servers_of(remote):
                if why := plain(server.get("problem")):
                    text = f"The sidecar cannot reach server {plain(server.get('name'))}: {why}."
                    problems.append((pod, _unreachable(cluster, text)))
        if why := plain(remote.get("shards_problem")):
            text = f"The sidecar cannot use its list of shards: {why}."
            problems.append((pod, warning(text, "Check that the operator runs.", "ShardsMissing")))
    good = ok(f"Sidecars that reach the remote tier: {len(remotes)}.")
    yield from grouped(problems, len(remotes), good)


def _unreachable(cluster: ClusterFacts, text: str) -> Result:
    host = host_remedy(cluster.resource, text)
    remedy = f"{host}." if host else "Check the server, the network policies and the password."
    return failure(text, remedy, "RemoteTierUnreachable")


def _is_asked(remote: Mapping[str, Any]) -> bool:
    """Whether a sidecar uses the tier, and reaches a server of it."""
    has_server = any(not server.get("problem") for server in servers_of(remote))
    return has_server and remote.get("is_reachable") is True


def refusals(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the servers accept rows, since the sidecars started."""
    remotes = parts_of(cluster, "remote")
    refused = merge.totals(remotes.values(), "refused")
    problems = [
        failure(f"{what} ({refused[code]:,} so far).", remedy)
        for code, (what, remedy) in _REFUSALS.items()
        if refused[code]
    ]
    yield from problems
    if remotes and not problems and all(map(_is_asked, remotes.values())):
        yield ok("Redis has accepted the rows of all sidecars.")


def servers_of(tier: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the servers that a tier's part of /stats lists, at most 64."""
    return objects_in(tier, "servers", _MAX_SERVERS)


def _servers(cluster: ClusterFacts) -> dict[str, Mapping[str, Any]]:
    """Return the servers that any sidecar could ask, by name. All sidecars have the same servers."""
    servers: dict[str, Mapping[str, Any]] = {}
    for remote in parts_of(cluster, "remote").values():
        for server in servers_of(remote):
            if server.get("policy") and len(servers) < _MAX_SERVERS:
                servers.setdefault(plain(server.get("name")), server)
    return servers


def settings(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check the memory limit and the eviction policy of each server."""
    servers = _servers(cluster)
    if not servers:
        if any(map(_could_ask, cluster.pods)):
            text = "Redis does not let the sidecars read its memory limit and policy."
            yield warning(text, f"Grant the Redis user +info ({_GUIDE}).")
        return
    problems = []
    for server, state in servers.items():
        policy, limit = plain(state.get("policy")), merge.count(state.get("max_bytes"))
        if not limit:
            text = f"The server has no memory limit, and its policy is {policy}."
            remedy = "Set maxmemory, and maxmemory-policy allkeys-lru, in Redis."
            problems.append((server, warning(text, remedy)))
        elif not policy.startswith("allkeys-"):
            text = f"The eviction policy is {policy}: a full server refuses new rows."
            problems.append((server, failure(text, "Set maxmemory-policy allkeys-lru in Redis.")))
    for result in dict.fromkeys(result for _, result in problems):
        concerned = [server for server, problem in problems if problem == result]
        text = f"{result.statement} Servers: {first_of(concerned)}."
        yield result._replace(statement=text)
    if not problems:
        sizes = {format_size(merge.count(state.get("max_bytes"))) for state in servers.values()}
        shown = ", ".join(sorted(sizes)[:3])
        yield ok(f"Servers with an allkeys policy and a memory limit of {shown}: {len(servers)}.")


def _could_ask(figures: PodFigures) -> bool:
    """Whether a sidecar has reached its servers for long enough to know their settings."""
    is_old = merge.count(figures.stats.get("uptime_seconds")) > _FIRST_CHECK_SECONDS
    return is_old and _is_asked(merge.part(figures.stats, "remote"))


def latency(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check how fast the servers answer."""
    remotes = parts_of(cluster, "remote")
    slowest = {
        pod: max((merge.count(server.get("answer_seconds")) for server in servers_of(remote)), default=0.0)
        for pod, remote in remotes.items()
    }
    known = {pod: seconds for pod, seconds in slowest.items() if seconds}
    slow = sorted((pod for pod in known if known[pod] > _SLOW_SECONDS), key=lambda pod: -known[pod])
    if slow:
        count, milliseconds = f"{len(slow)} of {len(known)}", f"{1000 * known[slow[0]]:.0f}"
        text = f"Redis takes up to {milliseconds} ms to answer {count} sidecars."
        remedy = "Run Redis in the same zone, check its load, and check the CPU of the sidecars."
        yield warning(f"{text} Slowest: {first_of(slow)}.", remedy)
    elif known:
        yield ok(f"Redis answers within {1000 * max(known.values()):.0f} ms.")


def evictions(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check how long the servers keep rows that are not used."""
    residences = [
        merge.count(remote.get("residence_seconds")) for remote in parts_of(cluster, "remote").values()
    ]
    known = [seconds for seconds in residences if seconds]
    if known and min(known) < _SHORT_SECONDS:
        text = f"Redis evicts a row that is not used after about {format_seconds(min(known))}."
        remedy = "Give Redis more memory, or set tiers.admit to OnReuse."
        yield warning(text, remedy)
    elif known:
        yield ok(f"Redis keeps a row that is not used for about {format_seconds(min(known))}.")


def shards(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the pods of managed servers are ready."""
    pods = cluster.shard_pods
    unready = [str(pod["metadata"]["name"]) for pod in pods if not is_ready(pod)]
    if unready:
        text = f"{len(unready)} of {len(pods)} server pods are not ready: {first_of(unready)}."
        command = facts.kubectl(f"describe pod {unready[0]}")
        yield failure(text, "Read its Events:", "ShardsMissing", command)
    elif pods:
        yield ok(f"Server pods that are ready: {len(pods)}.")
