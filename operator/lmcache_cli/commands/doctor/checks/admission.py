"""Checks whether the API server admits the pods of a cluster. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts
from lmcache_cli.commands.doctor.results import Result, failure, ok, unknown, warning
from lmcache_operator.errors import QUOTA
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain


def pod_of(stateful_set: Object) -> Object:
    """Return a pod of a StatefulSet for a dry run. A StatefulSet without uid does not exist yet."""
    metadata, template = stateful_set["metadata"], stateful_set["spec"]["template"]
    spec = dict(template["spec"])
    if "uid" not in metadata:
        spec.pop("serviceAccountName", None)  # the operator creates the account together with the StatefulSet
    labelled = {key: value for key, value in template["metadata"].items() if key in ("annotations", "labels")}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": labelled | {"name": f"{metadata['name']}-dry-run"},
        "spec": spec,
    }


def lacks_pods(stateful_set: Object) -> bool:
    """Whether the StatefulSet declares more pods than its controller has created."""
    return int(stateful_set["spec"].get("replicas", 1)) > int(dig(stateful_set, "status", "replicas") or 0)


def admission(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Report the API server's answer to a dry run of each kind of pod."""
    for trial in cluster.trials:
        pods = f"pods of component {trial.component}"
        text = f"The API server refuses {pods}: {plain(trial.refusal)}."
        remedy = f"Change what the message names in namespace {facts.namespace}, or the spec."
        if not trial.answer.is_known:
            yield unknown(trial.answer)
        elif trial.refusal and trial.lacks_pods:
            yield failure(text, remedy, "FailedCreate")
        elif trial.refusal and QUOTA not in trial.refusal:
            yield warning(f"{text} The present pods run.", remedy, "FailedCreate")
        elif trial.warnings:
            text = f"The API server admits {pods}, and warns: {plain(trial.warnings[0])}."
            yield warning(text, remedy, "FailedCreate")
        else:
            yield ok(f"The API server admits {pods}.")
