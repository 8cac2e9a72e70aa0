"""Start and end of the operator: it waits for its CRD first, and for its last write at the end."""

import asyncio
from typing import cast

from kubernetes.aio.client import ApiClient
from lmcache_operator import app
from lmcache_operator.errors import UnavailableError
from lmcache_operator.kube.client import KubeApi
from lmcache_operator.queue import KeyedQueue
from lmcache_operator.specs.kinds import CLUSTER, PROFILE

from tests.harness.jumping_loop import now, run


class Api:
    """An API server that returns the given answers in turn."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers, self.checked_kinds = list(answers), []

    async def serves(self, kind) -> bool:
        self.checked_kinds.append(kind)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_operator_waits_for_its_crd_and_logs_it_once(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(UnavailableError("GET /apis", "starting"), False, False, True, True, False)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert api.answers == [False]
    assert api.checked_kinds == [CLUSTER] * 4 + [PROFILE]
    assert [record.message for record in caplog.records] == [
        "waiting for the CRD lmcacheclusters.lmcache.io in the API server"
    ]


def test_operator_starts_without_the_profile_crd(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(True, *[False] * 20)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert len(api.answers) == 10
    assert [record.message for record in caplog.records] == [
        "waiting for the CRD lmcacheprofiles.lmcache.io in the API server"
    ]


class SlowClient:
    """An API server that works on a write for nine seconds. Kopf cancels remaining tasks after five."""

    async def param_serialize(self, verb, path, **_):
        return verb, path, {}

    async def call_api(self, *_, **__):
        await asyncio.sleep(9)
        raise OSError("no answer after all")


def test_ending_operator_waits_for_the_answer_to_its_last_write():
    """Another operator may lead only after that. Kopf waits for its cleanup handlers without a limit."""

    async def scenario() -> float:
        api = KubeApi(cast(ApiClient, SlowClient()))

        async def work(_: str) -> None:
            await api.evict("team", "pod", "uid")

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        handlers = app.build_registry(queue, api.settle)._activities.get_all_handlers()
        (cleanup,) = (each.fn for each in handlers if each.activity and each.activity.value == "cleanup")
        queue.wake("a")
        await asyncio.sleep(1)
        await cleanup()
        return now()

    assert run(scenario()) == 9
