"""Reasons to delay decisions about the number of shards, and their limits."""

from dataclasses import replace
from datetime import timedelta

from lmcache_operator.components.remote.remote import Remote, why_filling, why_never_ready
from lmcache_operator.components.remote.shards import WINDOW

from tests.harness.operator_shards import SET, Rig, ready_at


def test_hits_are_not_judged_while_shards_fill():
    def why() -> str:
        return why_filling(rig.observed(Remote()))

    rig = Rig(shards=2)
    assert why() == "there are no shards yet"
    rig.settle()
    assert why() == ""
    ready_at(rig, "demo-remote-1", rig.now)
    assert "new" in why()
    rig.now += WINDOW
    assert why() == ""
    rig.world.set_ready("demo-remote-0", False)
    assert "not ready" in why()
    rig.world.set_ready("demo-remote-0", True)
    rig.declare(1)
    rig.settle()
    assert "under way" in why()
    rig.now += WINDOW
    rig.settle()
    assert why() == ""
    del rig.world.pods["demo-remote-0"]
    assert why()


def test_shard_that_does_not_become_ready_fails_after_ten_minutes():
    def why() -> str:
        return why_never_ready(rig.observed(Remote()))

    rig = Rig.settled(shards=2)
    assert why() == ""
    rig.declare(3)
    rig.run()
    pod = rig.world.pods["demo-remote-2"]
    rig.world.set_ready("demo-remote-2", False)
    pod["metadata"]["creationTimestamp"] = rig.now.isoformat()
    assert (why(), rig.list[0]) == ("", 2)
    rig.now += timedelta(minutes=11)
    assert why() == "shard demo-remote-2 has not become ready in 10 minutes"
    rig.world.set_ready("demo-remote-2", True)
    assert why() == ""


def test_shard_that_cannot_be_created_fails_after_ten_minutes():
    """A quota can forbid the pod, for example. Then there is no pod to inspect."""

    def why() -> str:
        observed = rig.observed(Remote())
        owner, last = rig.world.objects[SET]["metadata"]["uid"], rig.now.isoformat()
        failure = {"reason": "FailedCreate", "message": "exceeded quota", "firstTimestamp": first.isoformat()}
        event_meta = {"involvedObject": {"uid": owner}, "lastTimestamp": last}
        return why_never_ready(replace(observed, warnings=(failure | event_meta,)))

    rig = Rig.settled(shards=2)
    rig.declare(3)
    rig.run()
    rig.world.pods.pop("demo-remote-2")
    first = rig.now = rig.now + timedelta(minutes=1)
    assert why() == ""
    rig.now += timedelta(minutes=11)
    assert why() == "no further shard could be created for 10 minutes: exceeded quota"
    del rig.world.pods["demo-remote-0"]  # a listed shard is missing, which is another problem
    assert why() == ""


def test_removed_shard_is_not_waited_for():
    rig = Rig.settled(shards=3)
    rig.declare(2)
    rig.settle()
    rig.world.set_ready("demo-remote-2", False)
    rig.world.pods["demo-remote-2"]["metadata"]["creationTimestamp"] = rig.now.isoformat()
    rig.now += timedelta(minutes=11)
    assert rig.list == (2, 3)
    assert why_never_ready(rig.observed(Remote())) == ""
