"""Checks of the peers tier: whether sidecars can read the memory tiers of other pods. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.checks.redis_servers import parts_of, servers_of
from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, grouped, ok, warning
from lmcache_operator.specs import names
from lmcache_operator.specs.cluster_refs import referred
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain


def reachable(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Check that the sidecars reach all peers. An unreachable peer costs hits, and nothing else."""
    problems = []
    has_tls = dig(cluster.resource, "spec", "tiers", "peers", "tls") is not None
    certificates = ", and that the certificates of both pods are valid and of the same authority"
    lender = referred(cluster.resource, "peers")
    uid = "" if lender else dig(cluster.resource, "metadata", "uid") or ""
    secret = names.secret_name(lender or cluster.name, names.PEERS, uid)
    parts = parts_of(cluster, "peers")
    for pod, part in parts.items():
        for server in servers_of(part):
            if why := plain(server.get("problem")):
                text = f"The sidecar cannot read from peer {plain(server.get('name'))}: {why}."
                remedy = (
                    f"Check that this pod runs, that it reaches port {names.PEERS_PORT}, and that both pods "
                    f"have the password of Secret {secret}{certificates if has_tls else ''}."
                )
                problems.append((pod, warning(text, remedy)))
        if why := plain(part.get("shards_problem")):
            text = f"The sidecar cannot use its list of peers: {why}."
            problems.append((pod, warning(text, "Check that the operator runs.")))
    good = ok(f"Sidecars that can read from all their peers: {len(parts)}.")
    yield from grouped(problems, len(parts), good)
