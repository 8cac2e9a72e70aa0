"""What the operator waits for before it watches, and before it ends."""

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
    """Gives one of its answers after the other."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers, self.asked = list(answers), []

    async def serves(self, kind) -> bool:
        self.asked.append(kind)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_it_waits_until_its_definition_is_served_and_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(UnavailableError("GET /apis", "starting"), False, False, True, True, False)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert api.answers == [False]
    assert api.asked == [CLUSTER] * 4 + [PROFILE]
    assert [record.message for record in caplog.records] == [
        "The API server does not serve lmcacheclusters.lmcache.io (yet): waiting"
    ]


def test_it_works_without_the_definition_of_profiles(monkeypatch, caplog):
    monkeypatch.setattr(app, "_DEFINITION_SECONDS", 0)
    api = Api(True, *[False] * 20)
    asyncio.run(asyncio.wait_for(app.wait_for_definition(api), 60))
    assert len(api.answers) == 10
    assert [record.message for record in caplog.records] == [
        "The API server does not serve lmcacheprofiles.lmcache.io (yet): waiting"
    ]


class SlowClient:
    """An API server that works on a write for nine seconds: kopf cancels what is left after five."""

    async def param_serialize(self, verb, path, **_):
        return verb, path, {}

    async def call_api(self, *_, **__):
        await asyncio.sleep(9)
        raise OSError("no answer after all")


def test_who_is_asked_to_end_waits_for_the_answer_to_its_last_write():
    """Only then may another operator lead: kopf waits for its cleanup handlers, however long they take."""

    async def scenario() -> float:
        api = KubeApi(cast(ApiClient, SlowClient()))

        async def work(_: str) -> None:
            await api.evict("team", "pod", "uid")

        queue = KeyedQueue(work, num_workers=1, debounce_seconds=0)
        handlers = app.build_registry(queue, api.settle)._activities.get_all_handlers()
        (cleanup,) = (h.fn for h in handlers if h.activity is not None and h.activity.value == "cleanup")
        queue.wake("a")
        await asyncio.sleep(1)
        await cleanup()
        return now()

    assert run(scenario()) == 9
