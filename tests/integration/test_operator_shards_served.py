"""The operator's list of shards with real servers and real sidecars: where rows are found."""

import contextlib

import pytest

from testing.kube.shards import PodShards
from testing.kube.sidecars import PodSidecars
from testing.processes import SidecarProcess
from testing.workloads.replay import Engine
from tests.harness.kube import CLUSTERS, NAME, example

pytestmark = [pytest.mark.kube, pytest.mark.redis]

ROW_BYTES, NUM_PODS = 64 << 10, 3
OLD, NEW = tuple(range(40)), tuple(range(100, 140))


def test_running_sidecars_use_an_added_shard_without_losing_rows(plane, operator, namespace, tmp_path):
    addresses = (f"127.94.65.{number}" for number in range(1, 250))  # no other test uses this range
    resource, sidecars_by_pod = example(), dict[str, SidecarProcess]()
    resource["spec"]["engine"]["replicas"] = NUM_PODS
    managed = {"shards": 1, "memoryPerShard": "512Mi"}
    resource["spec"]["tiers"] = {"memory": {"size": "64Mi"}, "remote": {"managed": managed}}
    with contextlib.ExitStack() as stack:
        shards = stack.enter_context(PodShards(plane.api, namespace, NAME, addresses, tmp_path))

        def options():
            shard_options = shards.options()
            return shard_options and {
                **shard_options,
                "remote_timeout_seconds": 60,
            }  # the machine may be slow

        pods = PodSidecars(
            plane.api, namespace, NAME, addresses, sidecars_by_pod.__setitem__, options=options
        )
        stack.enter_context(pods)
        plane.api.create(CLUSTERS, resource, namespace)
        plane.wait(lambda: pods.num_running == NUM_PODS)
        sidecars = [sidecars_by_pod[name] for name in sorted(sidecars_by_pod)]
        # The assumed prefill speed is so low that engines always load instead of computing.
        first, second, third = (
            stack.enter_context(contextlib.closing(Engine(sidecar, bytes(32), ROW_BYTES, 1e-3)))
            for sidecar in sidecars
        )

        def store(engine: Engine, sidecar: SidecarProcess, keys: tuple[int, ...]) -> None:
            assert engine.serve(f"store {keys[0]}", keys) == (0, 0)
            sidecar.wait_until(lambda stats: not stats["num_unwritten_rows"])

        store(first, sidecars[0], OLD)
        assert second.serve("two", OLD) == (0, len(OLD))

        more = {"spec": {"tiers": {"remote": {"managed": {"shards": 2}}}}}
        plane.api.patch(CLUSTERS, NAME, more, namespace)

        def has_second_server() -> bool:
            shards.check()
            return bool(shards.numbers[-1][1] == 2)

        plane.wait(has_second_server)
        for sidecar in sidecars:
            sidecar.wait_until(lambda stats: stats["remote"]["address"].count(":6379") == 2)
        # Rows that now belong to the new server are found on their previous server.
        assert third.serve("three", OLD) == (0, len(OLD))
        store(first, sidecars[0], NEW)
        assert second.serve("new", NEW) == (0, len(NEW))
        assert [sidecar.stats()["remote"]["failures"] for sidecar in sidecars] == [0] * NUM_PODS
        annotations = plane.api.get("v1/configmaps", f"{NAME}-remote", namespace)["metadata"]["annotations"]
        assert annotations["lmcache.io/shards"].startswith("2 from 1 until ")
