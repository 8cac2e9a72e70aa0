"""An API server that has only Leases, and connections to it that are slow and lose messages.

The delays are times of the loop of ``jumping_loop``.
"""

import asyncio
import copy
import itertools
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from lmcache_operator.election import LeaseName
from lmcache_operator.errors import NoAnswerError
from lmcache_operator.specs import Object
from lmcache_operator.specs.kinds import LEASE, Kind


def troubles(random: Random) -> dict[str, Callable[[], float]]:
    """States of a network, as values of ``Connection.trouble``."""
    return {
        "ok": lambda: 0.0,
        "slow": lambda: random.uniform(0, 12),
        "lossy": lambda: random.choice([-1.0, 0.0, 0.5, 4.0]),
        "freeze": lambda: random.choice([0.0, 40.0]),
        "kill": lambda: 60.0,
    }


class LeaseServer:
    """An API server that has at most one Lease."""

    def __init__(self) -> None:
        self.lease: Object | None = None
        self._versions = itertools.count(1)

    def put(self, lease: Object | None, version: str | None = None) -> Object | None:
        """Store the Lease if the present one has this version, and return it."""
        if version and not self.has(version):
            return None
        self.lease = copy.deepcopy(lease)
        if self.lease is not None:
            self.lease["metadata"] |= {"uid": "u", "resourceVersion": str(next(self._versions))}
        return copy.deepcopy(self.lease)

    def has(self, version: str) -> bool:
        """Whether the present Lease has this version."""
        return self.lease is not None and self.lease["metadata"]["resourceVersion"] == version

    def edit(self, **spec: Any) -> None:
        """Edit the spec by hand. None removes a field."""
        if self.lease is not None:
            changed = {k: v for k, v in {**self.lease["spec"], **spec}.items() if v is not None}
            self.put(self.lease | {"spec": changed})

    @property
    def holder(self) -> str:
        return str(self.lease and self.lease["spec"].get("holderIdentity"))


class Connection:
    """An operator's connection to the API server. ``trouble`` returns the delay of a message; -1 loses it."""

    def __init__(self, servers: Mapping[LeaseName, LeaseServer]) -> None:
        self.servers = servers
        self.trouble: Callable[[], float] = lambda: 0.0

    async def _call(self, work: Callable[[], Object | None]) -> Object | None:
        await self._pass()
        answer = work()
        await self._pass()
        return answer

    async def _pass(self) -> None:
        if (seconds := self.trouble()) < 0:
            raise NoAnswerError("lease", "lost")
        await asyncio.sleep(seconds)

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        assert kind == LEASE
        server = self.servers[LeaseName(namespace, name)]
        return await self._call(lambda: copy.deepcopy(server.lease))

    async def create(self, kind: Kind, wanted: Object) -> Object | None:
        server = self._server_of(wanted)
        return await self._call(lambda: None if server.lease else server.put(wanted))

    async def replace(self, kind: Kind, changed: Object) -> Object | None:
        server, version = self._server_of(changed), changed["metadata"]["resourceVersion"]
        return await self._call(lambda: server.put(changed, version))

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, resourceVersion: str) -> bool:
        server = self.servers[LeaseName(namespace, name)]

        def work() -> Object | None:
            deleted = server.lease if server.has(resourceVersion) else None
            return deleted and (server.put(None) or deleted)

        return await self._call(work) is not None

    def _server_of(self, lease: Object) -> LeaseServer:
        return self.servers[LeaseName(lease["metadata"]["namespace"], lease["metadata"]["name"])]

    async def settle(self) -> None:
        pass
