"""Tokens for the sidecar's pages: the Secret, the sidecar's mount and options, and the condition. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lmcache_operator.api.parse import Cluster
from lmcache_operator.api.types import TOKEN
from lmcache_operator.components.engine.features.base import PodFeature, Volume, optional_files
from lmcache_operator.contract.base import Observed, SidecarState
from lmcache_operator.contract.conditions import Condition, failure_of, silence_of
from lmcache_operator.pods.resize import env_of_sidecar
from lmcache_operator.specs import Object, names, paths
from lmcache_operator.specs.merge import dig

_TOKENS_DIR = "LMCACHE_HTTP_TOKENS_DIR"
_OPEN = (
    "it does not ask for tokens. If its image is of an earlier version, set spec.images.policy to Follow, or "
    "spec.sidecar.image to a later image"
)


class Tokens(PodFeature[bool]):
    """Tokens for pages. The report says whether clients outside the pod need a token."""

    name = "tokens"
    condition_type = "TokensRequired"
    absent = False

    def hashed(self, cluster: Cluster, settings: Object) -> None:
        """The pod mounts the tokens by the name of their Secret."""
        if _has_tokens(cluster):
            settings["pages"] = names.created_secret(cluster, names.PAGES)

    def env(self, cluster: Cluster) -> dict[str, str]:
        """A variable and not a key of the shared file: only pods that mount the tokens may get it."""
        return {_TOKENS_DIR: paths.PAGES_DIR} if _has_tokens(cluster) else {}

    def volumes(self, cluster: Cluster) -> Iterator[Volume]:
        """The accepted tokens. A missing Secret stops no pod: its sidecar accepts no token."""
        if _has_tokens(cluster):
            tokens = optional_files(names.created_secret(cluster, names.PAGES), "token", "operator")
            yield Volume("pages", paths.PAGES_DIR, tokens)

    def labels(self, cluster: Cluster) -> dict[str, str]:
        """The label by which PodMonitors of the chart skip the pod."""
        return {names.PAGES_LABEL: TOKEN} if _has_tokens(cluster) else {}

    def made(self, cluster: Cluster) -> Iterator[Object]:
        """The Secret with the tokens. A user who deletes it gets another token."""
        if _has_tokens(cluster):
            yield names.child(cluster, names.ENGINE, "Secret", names.created_secret(cluster, names.PAGES))

    def read(self, stats: Mapping[str, Any]) -> bool:
        """Whether the sidecar asks for tokens."""
        return stats.get("http_authentication") == TOKEN

    def condition(self, observed: Observed, sidecars: Sequence[SidecarState]) -> Condition | None:
        """Whether all sidecars ask for tokens, as the spec wants. None: it does not, or no sidecar runs."""
        if not _is_wanted(observed.resource) or not sidecars:
            return None
        without = [pod for pod in observed.pods if _TOKENS_DIR not in env_of_sidecar(pod)]
        former = [(str(pod["metadata"]["name"]), "") for pod in without]
        outdated, total = "engine pods do not ask for tokens yet", len(sidecars)
        is_open = [(each.pod, _OPEN) for each in sidecars if each.answers and not self.report(each)]
        problem = "sidecars show their pages to clients without a token"
        silent = [each.pod for each in sidecars if not each.answers]
        unknown = "sidecars do not report whether they ask for tokens"
        return (
            failure_of("Replacing", outdated, former, len(observed.pods))
            or failure_of("PagesOpen", problem, is_open, total)
            or silence_of("NoAnswer", unknown, silent, total)
            or Condition("True", "Required", f"All {total} sidecars ask for tokens.")
        )


def silence_remedy(resource: Object) -> str:
    """Return what to do if sidecars do not answer the operator."""
    remedy = f"Let the operator reach port {names.SIDECAR_PORT} of the pods"
    if not _is_wanted(resource):
        return remedy
    return f"{remedy}. If it can, the sidecar may have refused its token: see the log of the sidecar"


def _has_tokens(cluster: Cluster) -> bool:
    return cluster.spec.sidecar.http_authentication == TOKEN


def _is_wanted(resource: Object) -> bool:
    """Whether the spec asks for tokens, which may be invalid."""
    return bool(dig(resource, "spec", "sidecar", "httpAuthentication") == TOKEN)
