"""What the operator waits for before it watches."""

import asyncio

from lmcache_operator import app
from lmcache_operator.errors import UnavailableError
from lmcache_operator.specs.kinds import CLUSTER, PROFILE


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
