"""Checks of the installation: Kubernetes, the CRDs, the operator, versions and clocks. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from lmcache_cli.commands.doctor.answers import ApiAnswer
from lmcache_cli.commands.doctor.facts import NAME, RELEASE, SYSTEM_NAMESPACE, Facts
from lmcache_cli.commands.doctor.results import Result, failure, first_of, ok, unknown, warning
from lmcache_operator import DOCS, __version__
from lmcache_operator.api import GROUP, PLURAL
from lmcache_operator.contract.base import Observed
from lmcache_operator.contract.conditions import Problem
from lmcache_operator.pods.pods import condition_of, pod_problems, time_of
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain
from lmcache_store.common.units import format_seconds

MIN_KUBERNETES = (1, 33)
MAX_CLOCK_SECONDS = 5.0
"""Difference of two clocks that is a warning. Certificates, `until` of shards and rates depend on clocks."""
_MAX_START = timedelta(minutes=10)
"""Time for images and probes of an operator's pod, after which it has a problem."""
_FROM_CHECKOUT = f"in a checkout, as {DOCS}/get-started/cluster.md says:"
_PATIENT_SECONDS = 120
_VERSION_LABEL = "app.kubernetes.io/version"
_OPERATOR = "app.kubernetes.io/component=operator"


def absent(facts: Facts) -> Result | None:
    """Return the only result if neither the CRDs nor the operator are installed; else None."""
    if not facts.listed_clusters.is_missing or facts.operators.items:
        return None
    text = f"LMCache Cluster is not installed in {facts.where}."
    remedy = (
        "If this is the wrong one, choose another with --context: `kubectl config get-contexts` lists all. "
    )
    return failure(text, f"{remedy}Else install the chart {_FROM_CHECKOUT}", command=_install(facts))


def _install(facts: Facts) -> str:
    without = " --set crds.enabled=false" if _has_applied_definition(facts) else ""
    return facts.helm("install", f"--create-namespace{without}")


def _has_applied_definition(facts: Facts) -> bool:
    """Whether a CRD exists that no release of the chart created. Helm refuses to change it."""
    live = [answer.object for answer in facts.definitions.values() if answer.object]
    return any(RELEASE not in (each["metadata"].get("annotations") or {}) for each in live)


def api_server(facts: Facts, unchecked: Sequence[str]) -> Result:
    """Return the result about an API server that did not answer. ``unchecked``: checks that miss answers."""
    paths, reason = list(facts.unanswered), next(iter(facts.unanswered.values()))
    text = f"The API server of {facts.where} does not answer {first_of(paths)}: {reason}."
    text += f" Not checked: {', '.join(dict.fromkeys(unchecked))}."
    if reason.startswith("HTTP 5"):
        return failure(
            text, "Ask it which of its parts fails:", command=facts.kubectl("get --raw '/readyz?verbose'", "")
        )
    retry = f"kubectl lmcache doctor{facts.options} -n {facts.namespace} --timeout {_PATIENT_SECONDS}"
    return failure(
        text, "Check your connection. If the API server is slow, give it more time:", command=retry
    )


def namespace(facts: Facts) -> Iterator[Result]:
    """Check that the namespace exists."""
    if facts.namespace_object.is_missing:
        text = f"There is no namespace {facts.namespace} in {facts.where}."
        create = facts.kubectl(f"create namespace {facts.namespace}", "")
        yield failure(text, "Name another one with -n, or create it:", command=create)


def listed_clusters(facts: Facts) -> Iterator[Result]:
    """Check that the LMCacheClusters can be read."""
    answer = facts.listed_clusters
    if not answer.is_known:
        yield unknown(answer)
    elif not facts.clusters:
        text = f"Namespace {facts.namespace} has no LMCacheCluster."
        yield warning(
            text, "List those of all namespaces:", command=facts.kubectl("get lmcacheclusters -A", "")
        )
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
    missing = [name for name, answer in facts.definitions.items() if answer.is_missing]
    if missing:
        create = upgrade(facts, "--set crds.enabled=true")
        if _has_applied_definition(facts):
            create = facts.kubectl("apply --server-side -f crds", "")
        text = f"The API server lacks {' and '.join(f'the CRD {name}' for name in missing)}."
        yield failure(text, f"Create the missing CRDs {_FROM_CHECKOUT}", command=create)
    for name, answer in facts.definitions.items():
        if not answer.is_missing:
            yield _definition(facts, name, answer)._replace(check=f"crd:{name.partition('.')[0]}")


def _definition(facts: Facts, name: str, answer: ApiAnswer) -> Result:
    if not answer.is_known:
        return unknown(answer)
    if not _is_established(answer.object):
        text = f"The API server does not serve the CRD {name}."
        return failure(text, "Read the reason:", command=facts.kubectl(f"describe crd {name}", ""))
    return ok(f"The CRD {name} is present.")


def _is_established(definition: Object) -> bool:
    conditions = dig(definition, "status", "conditions") or ()
    return any(item.get("type") == "Established" and item.get("status") == "True" for item in conditions)


def upgrade(facts: Facts, more: str = "") -> str:
    """Return the command line that upgrades the release of the operator, and keeps the user's values."""
    return facts.helm("upgrade", f"--reset-then-reuse-values {more}".strip())


def operator(facts: Facts) -> Iterator[Result]:
    """Check that the operator is deployed and ready."""
    if not facts.operators.is_known:
        yield unknown(facts.operators)
        return
    deployments = facts.operators.items
    if not deployments:
        text = f"No operator is installed in {facts.where}, which has the CRDs."
        yield failure(text, f"Install the chart {_FROM_CHECKOUT}", "LMCacheOperatorDown", _install(facts))
    for deployment in deployments:
        yield _readiness(facts, deployment)
    if len(deployments) > 1:
        where = first_of([place_of(deployment) for deployment in deployments])
        text = f"{len(deployments)} operators are deployed: {where}."
        yield warning(text, "Uninstall all but one, or let each watch other namespaces.")


def place_of(deployment: Object) -> str:
    """Return namespace and name of an object."""
    return f"{deployment['metadata']['namespace']}/{deployment['metadata']['name']}"


def _readiness(facts: Facts, deployment: Object) -> Result:
    ready = dig(deployment, "status", "readyReplicas") or 0
    wanted = dig(deployment, "spec", "replicas")
    wanted = 1 if wanted is None else wanted
    name, place = deployment["metadata"]["name"], deployment["metadata"]["namespace"]
    if not wanted:
        text, scale = (
            f"The operator {place_of(deployment)} is scaled to 0 pods.",
            f"scale deployment/{name} --replicas=2",
        )
        return failure(text, "Start it:", "LMCacheOperatorDown", facts.kubectl(scale, place))
    text = f"{ready} of {wanted} pods of the operator {place_of(deployment)} are ready."
    if ready >= wanted:
        return ok(text)
    level = warning if ready else failure
    pods = tuple(pod for pod in facts.operator_pods.items if pod["metadata"]["namespace"] == place)
    observed = Observed(resource={}, pods=pods, now=facts.server_time)
    refusal = condition_of(deployment, "ReplicaFailure").get("message")
    problems = [Problem("FailedCreate", refusal)] if refusal else [*pod_problems(observed)]
    if problems:
        text, command = (
            f"{text} First: {plain(problems[0].message)}.",
            facts.kubectl(f"describe pods -l {_OPERATOR}", place),
        )
        return level(text, "Read the Events of its pods:", problems[0].reason, command)
    since = facts.server_time - time_of(
        condition_of(deployment, "Available").get("lastTransitionTime"), observed
    )
    if since < _MAX_START:
        return warning(f"{text} {starting(since, _MAX_START)}", "Wait.")
    return level(text, "Read its log:", "LMCacheOperatorDown", operator_log(facts))


def operator_log(facts: Facts) -> str:
    """Return the command that prints the log of the operator's pods."""
    place = next((each["metadata"]["namespace"] for each in facts.operators.items), SYSTEM_NAMESPACE)
    return facts.kubectl(f"logs -l {_OPERATOR} --prefix --tail=100", place)


def starting(since: timedelta, limit: timedelta) -> str:
    """Return the sentence about pods that become ready in time."""
    age, end = (format_seconds(round(each.total_seconds())) for each in (since, limit))
    return f"Starting since {age}, which may take up to {end}."


def watched_namespace(facts: Facts) -> Iterator[Result]:
    """Check that an operator watches the namespace."""
    watching = [watched(deployment) for deployment in facts.operators.items]
    if not watching:
        return
    if any(not namespaces or facts.namespace in namespaces for namespaces in watching):
        yield ok("The operator watches this namespace.")
    else:
        text = f"The operator does not watch namespace {facts.namespace}."
        valid = [each for each in watching[0] if NAME.fullmatch(each)]
        more = upgrade(facts, f"--set 'watchNamespaces={{{','.join([*valid, facts.namespace])}}}'")
        yield failure(text, f"Add the namespace to watchNamespaces {_FROM_CHECKOUT}", command=more)


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
        yield warning(text, f"Use one version of chart, CRDs and command: {DOCS}/how-to/upgrade.md")
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
