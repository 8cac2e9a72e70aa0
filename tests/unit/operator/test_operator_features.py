"""Promises of all features of an engine pod."""

import pkgutil
from typing import Any

import pytest

from lmcache_operator.api.parse import Cluster, parse
from lmcache_operator.components.engine import features
from lmcache_operator.components.engine.features import FEATURES, TIERS
from lmcache_operator.components.engine.features.base import PodFeature
from lmcache_operator.contract.base import SidecarState
from lmcache_operator.errors import InvalidSpecError
from tests.harness.operator.model import cluster
from tests.harness.operator.render import container, env_of, pod_of
from tools.resource_docs import CONDITIONS

KEYS = {"encryption": {"secretRef": {"name": "keys"}}}
SALT = {"name": "search", "saltSecretRef": {"name": "salt"}}
FULL: dict[str, Any] = {
    "sidecar": {"httpAuthentication": "Token"},
    "tenants": {"named": [SALT]},
    "tiers": {
        "disk": {"size": "1Gi", **KEYS},
        "peers": {"bytesPerSecond": "1Gi", "tls": {"issuerRef": {"name": "ca"}}},
        "remote": {"managed": {"memoryPerShard": "1Gi"}, **KEYS},
    },
}
ODD = ({}, {"disk": 5, "remote": [], "peers": "x", "transfer": None, "memory": {"usable_bytes": -1}})
each_feature = pytest.mark.parametrize("feature", FEATURES, ids=[feature.name for feature in FEATURES])


def parsed(changes: dict[str, Any]) -> Cluster:
    return parse(cluster(**changes))


def parts_of(feature: PodFeature[Any], changes: dict[str, Any]) -> list[Any]:
    """Everything that a feature adds to the pod and to the objects next to it."""
    cluster = parsed(changes)
    calls = feature.config, feature.files, feature.env, feature.labels, feature.ports
    return [part for part in (*(call(cluster) for call in calls), list(feature.volumes(cluster))) if part]


def test_every_module_of_a_feature_is_listed_once() -> None:
    modules = {module.name for module in pkgutil.iter_modules(features.__path__)} - {"base"}
    assert modules == {type(feature).__module__.rpartition(".")[2] for feature in FEATURES}
    names = [feature.name for feature in FEATURES]
    assert len(names) == len(set(names)) == len(modules)
    assert [tier.name for tier in TIERS] == ["remote", "disk", "peers"]


def test_conditions_are_different_and_documented() -> None:
    types = [feature.condition_type for feature in FEATURES if feature.condition_type]
    assert len(types) == len(set(types))
    assert set(types) <= CONDITIONS.keys()


@each_feature
def test_feature_without_a_setting_adds_nothing(feature: PodFeature[Any]) -> None:
    assert parts_of(feature, {}) == []
    if feature.name not in ("pinning", "sharing"):  # a report only
        assert parts_of(feature, FULL)


@each_feature
def test_user_can_not_replace_a_variable_of_a_feature(feature: PodFeature[Any]) -> None:
    for variable in feature.env(parsed(FULL)):
        assert env_of(container(pod_of(**FULL), "sidecar"))[variable]
        env = {"name": "sidecar", "env": [{"name": variable, "value": "x"}]}
        template = {"podTemplate": {"spec": {"initContainers": [env]}}}
        with pytest.raises(InvalidSpecError, match=f"sets {variable} of the container sidecar"):
            pod_of(**FULL, engine=template)


@each_feature
@pytest.mark.parametrize("stats", ODD)
def test_odd_report_has_defaults(feature: PodFeature[Any], stats: dict[str, Any]) -> None:
    report = feature.read(stats)
    assert feature.steady(report, feature.absent) == report
    sidecar = SidecarState(features={feature.name: report})
    assert feature.report(sidecar) == report
    assert feature.report(SidecarState()) == feature.absent
    assert not feature.is_present(sidecar)
