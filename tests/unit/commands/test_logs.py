"""``kubectl lmcache logs`` through a stand-in for the API server, with the faults of real ones."""

import asyncio
import itertools
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from lmcache_operator.__main__ import _parser
from lmcache_operator.commands import log_streams, logs, printing
from lmcache_operator.commands.connection import Connection
from lmcache_operator.kube.client import KubeApi

from tests.harness.command_world import pod
from tests.harness.operator_model import cluster

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def stamped(seconds: float, text: str) -> bytes:
    return f"2026-11-25T12:00:{seconds:012.9f}Z {text}\n".encode()


def refusal(status: int, message: str) -> web.Response:
    body = {"kind": "Status", "message": message, "reason": "Because", "code": status}
    return web.json_response(body, status=status)


class ApiServer:
    """Serves a cluster ``team/demo``, its pods, and their logs."""

    def __init__(self, num_pods: int = 2) -> None:
        self.pods = [pod(number) for number in range(num_pods)]
        self.operator_pods: list[Any] = []
        self.logs: dict[tuple[str, str], bytes | Handler] = {}
        self.queries: list[dict[str, str]] = []
        self.is_blind = False
        """The user may not list pods of all namespaces."""
        self.is_down, self.num_refused_lists = False, 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.strip("/").split("/")
        if parts[-1] == "log":
            self.queries.append({"pod": parts[-2], **request.query})
            log = self.logs.get((parts[-2], request.query["container"]), b"")
            return await log(request) if callable(log) else web.Response(body=log)
        if parts[-1] == "pods":
            if self.is_down:
                self.num_refused_lists += 1
                return refusal(503, "etcd is down")
            if request.path == "/api/v1/pods":
                if self.is_blind:
                    return refusal(403, "pods is forbidden")
                return web.json_response({"items": self.operator_pods})
            is_injected = "inject" in request.query["labelSelector"]
            return web.json_response({"items": [] if is_injected else self.pods})
        return web.json_response(cluster())


@asynccontextmanager
async def connected(server: ApiServer) -> AsyncIterator[Connection]:
    application = web.Application()
    application.router.add_route("*", "/{tail:.*}", server.handle)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        settings = Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        async with ApiClient(settings) as client:
            yield Connection(KubeApi(client), "team")
    finally:
        await runner.cleanup()


def run(server: ApiServer, *words: str, until: Callable[[], bool] | None = None) -> int:
    """Run the command. ``until``: follow the logs until this is true."""
    argv = ["logs", "demo", *words, *(["--follow"] if until else [])]
    arguments = _parser(argv).parse_args(argv)

    async def call() -> int:
        async with connected(server) as connection:
            reader = logs._Logs(connection, "demo", arguments)
            status = await reader.show()
            if until:
                following = asyncio.create_task(reader.follow())
                async with asyncio.timeout(60):
                    while not until():  # noqa: ASYNC110 - the condition has no event
                        await asyncio.sleep(0.01)  # real time: a pause between polls
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
            return status

    return asyncio.run(call())


def run_to_the_end(server: ApiServer) -> None:
    """Follow the logs until the command raises."""
    argv = ["logs", "demo", "--follow"]
    arguments = _parser(argv).parse_args(argv)

    async def call() -> None:
        async with connected(server) as connection, asyncio.timeout(60):
            reader = logs._Logs(connection, "demo", arguments)
            await reader.show()
            await reader.follow()

    asyncio.run(call())


@pytest.fixture
def server() -> ApiServer:
    server = ApiServer()
    operator_pod = pod() | {
        "metadata": {"name": "op-0", "namespace": "system", "uid": "op"},
        "spec": {"containers": [{"name": "operator"}]},
    }
    server.operator_pods = [operator_pod]
    server.logs = {
        ("demo-engine-0", "engine"): stamped(1, "engine starts") + stamped(5, "engine \x1b[2Jserves"),
        ("demo-engine-0", "sidecar"): stamped(2, "sidecar starts"),
        ("demo-engine-1", "engine"): stamped(4, "second engine"),
        ("op-0", "operator"): stamped(3, "2026-11-25T12:00:03.000Z INFO x: default/demo: applied")
        + stamped(3.5, "2026-11-25T12:00:03.500Z INFO x: team/demo: applied"),
    }
    return server


def test_lines_of_all_components_are_merged_by_time(server, capsys):
    assert run(server) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.splitlines() == [
        "2026-11-25T12:00:01.000Z demo-engine-0/engine engine starts",
        "2026-11-25T12:00:02.000Z demo-engine-0/sidecar sidecar starts",
        "2026-11-25T12:00:03.500Z op-0/operator 2026-11-25T12:00:03.500Z INFO x: team/demo: applied",
        "2026-11-25T12:00:04.000Z demo-engine-1/engine second engine",
        "2026-11-25T12:00:05.000Z demo-engine-0/engine engine serves",
    ]
    assert {query["sinceSeconds"] for query in server.queries} == {"600"}


def test_options_choose_lines(server, capsys):
    assert run(server, "--component", "sidecar", "--since", "1h30m", "--tail", "7", "-o", "json") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["message"] == "sidecar starts"
    assert all((query["sinceSeconds"], query["tailLines"]) == ("5400", "7") for query in server.queries)
    assert run(server, "--pod", "demo-engine-1") == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["demo-engine-1/engine"]


def test_previous_logs_are_those_of_restarted_containers(server, capsys):
    server.pods[0]["status"]["initContainerStatuses"] = [{"name": "sidecar", "restartCount": 1}]
    assert run(server, "--previous") == 0
    assert [(query["pod"], query["container"], query["previous"]) for query in server.queries] == [
        ("demo-engine-0", "sidecar", "true")
    ]


def test_faults_of_some_logs_leave_the_others_complete(server, capsys, monkeypatch):
    monkeypatch.setattr(log_streams, "_ALL_SECONDS", 1.0)

    async def waiting(_: web.Request) -> web.StreamResponse:
        return refusal(400, "container engine is waiting to start: PodInitializing")

    async def hanging(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(stamped(0, "before it hangs"))
        await asyncio.Event().wait()
        raise AssertionError

    server.logs["demo-engine-1", "engine"] = waiting
    server.logs["demo-engine-1", "sidecar"] = hanging
    assert run(server) == 0
    printed = capsys.readouterr()
    assert "before it hangs" in printed.out
    assert "engine serves" in printed.out
    assert "demo-engine-1/engine: container engine is waiting to start: PodInitializing" in printed.err
    assert "demo-engine-1/sidecar: not complete after" in printed.err


def test_missing_rights_are_named_and_other_lines_are_shown(server, capsys):
    server.is_blind = True
    assert run(server) == 0
    printed = capsys.readouterr()
    assert "engine serves" in printed.out
    assert "Its pods cannot be listed in all namespaces: pods is forbidden" in printed.err
    assert "--operator-namespace" in printed.err

    async def forbidden(_: web.Request) -> web.StreamResponse:
        return refusal(403, 'pods "p" is forbidden: User "u" cannot get resource "pods/log"')

    server.logs = {
        (f"demo-engine-{n}", container): forbidden for n in range(2) for container in ("engine", "sidecar")
    }
    assert run(server) == 2
    error = capsys.readouterr().err
    assert error.count('It needs the right "get pods/log"') == 1
    assert "kubectl -n team create role" in error


def test_thousand_pods_take_bounded_memory(capsys):
    server = ApiServer(num_pods=1000)
    log = b"".join(stamped(number / 100, "x" * 500) for number in range(400))  # 0.4 GB of text together
    server.logs = {
        (f"demo-engine-{n}", container): log for n in range(1000) for container in ("engine", "sidecar")
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert run(server, "--component", "engine", "--component", "sidecar") == 0
    printed = capsys.readouterr()
    assert "use --since, --tail or --pod" in printed.err
    assert len(printed.err.splitlines()) <= printing._MAX_PROBLEMS + 2
    del printed
    # The lines take 64 MiB. The test itself has them once more, as the command's output.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 << 10


def test_followed_streams_are_ordered_and_survive_a_broken_connection(server, capsys, monkeypatch):
    monkeypatch.setattr(log_streams, "_RETRY_SECONDS", 0.01)
    monkeypatch.setattr(logs, "_LIST_SECONDS", 0.05)
    printed: list[str] = []
    monkeypatch.setattr(logs._Logs, "_print", lambda _, line: printed.append(line.message))
    numbers = {"engine": 0, "sidecar": 0}

    def stream(container: str, *seconds: float) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            if "follow" not in request.query:
                return response
            numbers[container] += 1
            for second in seconds[: 2 * numbers[container]]:  # each connection gets two lines further
                await response.write(stamped(second, f"{container} {second}"))
            if 2 * numbers[container] >= len(seconds):
                await asyncio.Event().wait()
            return response

        return handle

    server.pods = server.pods[:1]
    server.logs = {
        ("demo-engine-0", "engine"): stream("engine", 1.0, 1.2, 5.0, 6.0),
        ("demo-engine-0", "sidecar"): stream("sidecar", 1.1, 1.3, 5.5, 5.6),
        ("demo-engine-7", "engine"): stream("engine", 7.0),
    }

    def is_done() -> bool:
        if len(printed) == 8 and len(server.pods) == 1:
            server.pods.append(pod(7))  # a new pod is found
        return len(printed) == 9

    assert run(server, until=is_done) == 0
    order = ["engine 1.0", "sidecar 1.1", "engine 1.2", "sidecar 1.3"]
    order += ["engine 5.0", "sidecar 5.5", "sidecar 5.6", "engine 6.0", "engine 7.0"]
    assert printed == order


def test_reader_of_the_output_that_has_enough_ends_the_command(server, monkeypatch):
    def closed(*_: object) -> None:
        raise BrokenPipeError

    def line(number: int) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return web.Response(body=stamped(number, "m") if "follow" in request.query else b"")

        return handle

    server.logs = {("demo-engine-0", "engine"): line(1)}
    monkeypatch.setattr(logs._Logs, "_print", closed)
    with pytest.raises(BrokenPipeError):
        run_to_the_end(server)


def test_failed_list_leaves_followed_logs_alone(server, capsys, monkeypatch):
    monkeypatch.setattr(logs, "_LIST_SECONDS", 0.02)
    monkeypatch.setattr(log_streams, "_RETRY_SECONDS", 0.01)
    numbers = itertools.count(10)
    connections: list[str] = []

    async def growing(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        if "follow" in request.query:
            connections.append(request.path)
            server.is_down = True
            while True:
                await response.write(stamped(next(numbers), "new"))
                await asyncio.sleep(0.05)  # real time: a pod that writes all the time
        return response

    server.pods, server.operator_pods = server.pods[:1], []
    server.logs = {("demo-engine-0", "engine"): growing}
    printed: list[str] = []
    monkeypatch.setattr(logs._Logs, "_print", lambda _, line: printed.append(line.message))
    assert run(server, "--component", "engine", until=lambda: len(printed) > 5) == 0
    assert server.num_refused_lists > 5
    assert len(connections) == 1


def test_wrong_options_are_refused(server, capsys):
    for words, message in (
        (["--since", "soon"], "'soon' is not a time such as 30s, 10m or 2h"),
        (["--tail", "0"], "'0' is not a number of lines"),
        (["--component", "redis"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            run(server, *words)
        assert message in capsys.readouterr().err
    with pytest.raises(logs.NotFoundError, match="no engine pod demo-engine-9"):
        run(server, "--pod", "demo-engine-9")
