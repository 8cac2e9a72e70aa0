"""A node with the chart installed, and one LMCacheCluster that tests share. ``make e2e`` starts it."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from testing.child_process import REPOSITORY
from testing.node import app, inside
from testing.node.app import App
from testing.node.cluster import NodeCluster
from testing.node.report import report
from tools import images

RUN = REPOSITORY / ".e2e"
"""Files of a run: the time of each step, and the logs after a failure."""
_NODE = pytest.StashKey[NodeCluster]()


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session")
def references() -> dict[str, str]:
    """References of the images, as pods use them."""
    return {name: images.IMAGES[name].reference for name in images.IMAGES}


@pytest.fixture(scope="session")
def node(request, references) -> Iterator[NodeCluster]:
    if not inside.group():
        pytest.fail("these tests run in the namespaces of a node: run `make e2e`")
    built = {name: images.find(name) for name in references}
    if missing := [name for name, image in built.items() if image is None]:
        pytest.exit(f"run `make images` first: not built from this checkout: {', '.join(missing)}", 1)
    archives = [image.archive for image in built.values() if image]
    with NodeCluster(pause=references["pause"], images=archives) as node:
        request.config.stash[_NODE] = node
        node.enforce_network_policies()
        yield node
        RUN.mkdir(exist_ok=True)
        (RUN / "timeline.json").write_text(json.dumps(node.seconds, indent=1))


@pytest.fixture(scope="session")
def installed(node, references) -> NodeCluster:
    """The node with the chart, a Redis and the volumes of `testing.node.app`."""
    app.prepare(node, references)
    app.install(node)
    return node


@pytest.fixture(scope="session")
def make_app(installed, references) -> Callable[..., App]:
    """Create an LMCacheCluster without applying it. Tests delete the clusters that they apply."""
    return lambda name, **tiers: App(installed, app.tiny_cluster(name, references["engine"], **tiers))


@pytest.fixture(scope="session")
def tiny(make_app) -> App:
    """One LMCacheCluster, Ready at first. Each test must leave it Ready and with its original spec."""
    tiny = make_app("tiny")
    tiny.apply()
    tiny.node.reached("LMCacheCluster applied")
    tiny.ready_pod()
    tiny.node.reached("engine's pod ready")
    tiny.wait_condition("Ready")
    tiny.node.reached("condition Ready")
    return tiny


def pytest_terminal_summary(terminalreporter, config):
    if node := config.stash.get(_NODE, None):
        terminalreporter.section("seconds after the start of the control plane")
        for step, seconds in node.seconds.items():
            terminalreporter.line(f"{seconds:7.1f}  {step}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    node = item.config.stash.get(_NODE, None)
    if outcome.failed and node is not None:
        outcome.sections.append(("the node", report(node)))
    return outcome
