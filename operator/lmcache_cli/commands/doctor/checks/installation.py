"""Checks of the installation: Kubernetes, the CRDs, the operator, versions and clocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.facts import Facts
from lmcache_cli.commands.doctor.results import Result, failure, first_of, ok, unknown, warning
from lmcache_operator import __version__
from lmcache_operator.api import GROUP, PLURAL
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig

MIN_KUBERNETES = (1, 33)
MAX_CLOCK_SECONDS = 5.0
"""Difference of two clocks that is a warning. Certificates, `until` of shards and rates depend on clocks."""
_APPLY = "Upgrade the chart with crds.enabled=true, or run: kubectl apply --server-side -f crds/"
_INSTALL = "Install the chart charts/lmcache-operator, as docs/get-started/cluster.md describes."
_VERSION_LABEL = "app.kubernetes.io/version"


def absent(facts: Facts) -> Result | None:
    """Return the only result if neither the CRDs nor the operator are installed; else None."""
    operators = facts.operators
    if not facts.listed_clusters.is_missing or not operators.is_known or operators.items:
        return None
    text = "LMCache Cluster is not installed in this Kubernetes cluster."
    remedy = f"Check the context: kubectl config current-context. If it is the right one: {_INSTALL}"
    return failure(text, remedy)


def listed_clusters(facts: Facts) -> Iterator[Result]:
    """Check that the LMCacheClusters can be read."""
    answer = facts.listed_clusters
    if not answer.is_known:
        yield unknown(answer)
    elif answer.is_missing:
        yield failure("The API server has no LMCacheClusters.", _APPLY)
    elif not facts.clusters:
        text = f"Namespace {facts.namespace} has no LMCacheCluster."
        yield warning(text, "List all: kubectl get lmcacheclusters -A")
    else:
        number = len(facts.clusters)
        yield ok(f"Found {number} LMCacheCluster{'s' if number > 1 else ''}.")


def kubernetes_version(facts: Facts) -> Iterator[Result]:
    """Check the version of Kubernetes against the support matrix."""
    if not facts.version.is_known:
        yield unknown(facts.version)
        return
    git_version, number = str(facts.version.object.get("gitVersion")), version_of(facts)
    if number is None:
        yield warning(f"Kubernetes reports the version {git_version!r}.", "Check its version by hand.")
    elif number < MIN_KUBERNETES:
        text = f"Kubernetes {git_version} is not supported."
        yield failure(text, "Upgrade Kubernetes to 1.33 or newer.")
    else:
        yield ok(f"Kubernetes {git_version} is supported.")


def version_of(facts: Facts) -> tuple[int, int] | None:
    """Return major and minor version of Kubernetes; None if it is unknown."""
    return parse_version(str(facts.version.object.get("gitVersion")))


def parse_version(text: str) -> tuple[int, int] | None:
    """Return major and minor version of a text such as "v1.33.2"; None for another text."""
    match = re.search(r"(\d{1,4})\.(\d{1,4})", text)
    return (int(match[1]), int(match[2])) if match else None


def definitions(facts: Facts) -> Iterator[Result]:
    """Check that the API server serves the CRDs."""
    for name, answer in facts.definitions.items():
        yield _definition(name, answer)._replace(check=f"crd:{name.partition('.')[0]}")


def _definition(name: str, answer: ApiAnswer) -> Result:
    if not answer.is_known:
        return unknown(answer)
    if answer.is_missing:
        return failure(f"The CRD {name} is missing.", _APPLY)
    if not _is_established(answer.object):
        text = f"The API server does not serve the CRD {name}."
        return failure(text, f"Read the reason: kubectl describe crd {name}")
    return ok(f"The CRD {name} is present.")


def _is_established(definition: Object) -> bool:
    conditions = dig(definition, "status", "conditions") or ()
    return any(item.get("type") == "Established" and item.get("status") == "True" for item in conditions)


def operator(facts: Facts) -> Iterator[Result]:
    """Check that the operator is deployed and ready."""
    if not facts.operators.is_known:
        yield unknown(facts.operators)
        return
    deployments = facts.operators.items
    if not deployments:
        yield failure("No Deployment of the operator exists.", _INSTALL, "LMCacheOperatorDown")
    for deployment in deployments:
        yield _readiness(deployment)
    if len(deployments) > 1:
        where = first_of([place_of(deployment) for deployment in deployments])
        text = f"{len(deployments)} operators are deployed: {where}."
        yield warning(text, "Uninstall all but one, or let each watch other namespaces.")


def place_of(deployment: Object) -> str:
    """Return namespace and name of an object."""
    return f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"


def _readiness(deployment: Object) -> Result:
    ready = dig(deployment, "status", "readyReplicas") or 0
    wanted = dig(deployment, "spec", "replicas")
    wanted = 1 if wanted is None else wanted
    text = f"{ready} of {wanted} pods of the operator {place_of(deployment)} are ready."
    if not ready:
        remedy = f"Read the log: kubectl -n {deployment['metadata']['namespace']} logs "
        remedy += f"deployment/{deployment['metadata']['name']}"
        return failure(text, remedy, "LMCacheOperatorDown")
    if ready < wanted:
        return warning(text, "Read the Events of its pods.", "LMCacheOperatorDown")
    return ok(text)


def watched_namespace(facts: Facts) -> Iterator[Result]:
    """Check that an operator watches the namespace."""
    watching = [watched(deployment) for deployment in facts.operators.items]
    if not watching:
        return
    if any(not namespaces or facts.namespace in namespaces for namespaces in watching):
        yield ok("The operator watches this namespace.")
    else:
        text = f"The operator does not watch namespace {facts.namespace}."
        yield failure(text, "Add the namespace to watchNamespaces in the values of the chart.")


def watched(deployment: Object) -> list[str]:
    """Return the namespaces that an operator watches; empty: all."""
    return [
        str(argument).partition("=")[2]
        for container in dig(deployment, "spec", "template", "spec", "containers") or ()
        for argument in container.get("args") or ()
        if str(argument).startswith("--namespace=")
    ]


def versions(facts: Facts) -> Iterator[Result]:
    """Check that operator, CRD and this command have one version."""
    labels = {place_of(deployment): version_label(deployment) for deployment in facts.operators.items}
    definition = facts.definitions.get(f"{PLURAL}.{GROUP}")
    if definition and (label := version_label(definition.object)):
        labels["the CRD"] = label
    differing = [f"{place} has {version}" for place, version in labels.items() if version != __version__]
    if differing:
        text = f"This command has version {__version__}, and {first_of(differing)}."
        yield warning(text, "Use one version of chart, CRDs and command (docs/how-to/upgrade.md).")
    elif labels:
        yield ok(f"Chart and command have version {__version__}.")


def version_label(live: Any) -> str:
    """Return the version in the labels that the chart sets; empty: there is none."""
    return str(dig(live, "metadata", "labels", _VERSION_LABEL) or "")


def clocks(facts: Facts) -> Iterator[Result]:
    """Check the user's clock against the clock of the API server."""
    offset = facts.api_offset_seconds
    if offset is None:
        return
    if abs(offset) > MAX_CLOCK_SECONDS:
        text = f"Your clock and the clock of the API server differ by {abs(offset):.0f} s."
        yield warning(text, "Synchronize both clocks with NTP.")
    else:
        yield ok("Your clock and the clock of the API server agree.")
