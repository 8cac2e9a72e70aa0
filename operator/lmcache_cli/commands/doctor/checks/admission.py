"""Checks whether the API server admits the pods of a cluster. Pure."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from decimal import Decimal

from lmcache_cli.commands.doctor.facts import ClusterFacts, Facts, PodTrial
from lmcache_cli.commands.doctor.results import Result, failure, ok, unknown, warning
from lmcache_operator.errors import QUOTA
from lmcache_operator.specs import Object
from lmcache_operator.specs.merge import dig
from lmcache_store.common.text import plain
from lmcache_store.common.units import parse_quantity

_FULL = re.compile(
    rf"{QUOTA}: (?P<name>\S+), requested: (?P<requested>\S+), used: (?P<used>\S+), limited: \S"
)
_AMOUNT = re.compile(r"([^=,]+)=([^=,]+)")


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


def num_missing(stateful_set: Object) -> int:
    """Return how many of the pods that a StatefulSet declares its controller has not created."""
    return int(stateful_set["spec"].get("replicas", 1)) - int(dig(stateful_set, "status", "replicas") or 0)


def admission(facts: Facts, cluster: ClusterFacts) -> Iterator[Result]:
    """Report the API server's answer to a dry run of each kind of pod."""
    full = dict[str, list[PodTrial]]()
    for trial in cluster.trials:
        pods = f"pods of component {trial.component}"
        text = f"The API server refuses {pods}: {plain(trial.refusal)}."
        remedy = f"Change what the message names in namespace {facts.namespace}, or the spec."
        if not trial.answer.is_known:
            yield unknown(trial.answer)
        elif trial.num_missing > 0 and (quota := _FULL.search(trial.refusal)):
            full.setdefault(quota["name"], []).append(trial)
        elif trial.refusal and trial.num_missing > 0:
            yield failure(text, remedy, "FailedCreate")
        elif trial.refusal and QUOTA not in trial.refusal:
            yield warning(f"{text} The present pods run.", remedy, "FailedCreate")
        elif trial.warnings:
            text = f"The API server admits {pods}, and warns: {plain(trial.warnings[0])}."
            yield warning(text, remedy, "FailedCreate")
        else:
            yield ok(f"The API server admits {pods}.")
    for name, trials in full.items():
        components = " and ".join(trial.component for trial in trials)
        text = f"The API server refuses pods of component {components}: {plain(trials[0].refusal)}."
        remedy = "Request less in the spec, or raise the quota for the missing pods:"
        yield failure(text, remedy, "FailedCreate", facts.kubectl(_raise_quota(name, trials)))


def _raise_quota(name: str, trials: Sequence[PodTrial]) -> str:
    """Return the command that raises a quota so that it admits all missing pods."""
    hard = dict[str, Decimal]()
    for trial in trials:
        if quota := _FULL.search(trial.refusal):
            for resource, amount in _AMOUNT.findall(quota["used"]):
                hard.setdefault(resource, parse_quantity(amount))
            for resource, amount in _AMOUNT.findall(quota["requested"]):
                hard[resource] += trial.num_missing * parse_quantity(amount)
    amounts = {resource: f"{amount.normalize():f}" for resource, amount in hard.items()}
    patch = json.dumps({"spec": {"hard": amounts}})
    return f"patch resourcequota {name} --type=merge -p {shlex.quote(patch)}"
