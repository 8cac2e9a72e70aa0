"""Settings of a group's launcher: each mistake has one sentence, and vLLM gets the options of its part."""

import re
from pathlib import Path

import pytest

from lmcache_client.group.settings import read

COMMAND = ["--", "python3", "serve"]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "secret").write_text("0123456789abcdef\n")
    (tmp_path / "short").write_text("0123456789abcde\n")
    return {
        "LMCACHE_GROUP_NODES": "2",
        "LMCACHE_GROUP_RANK": "1",
        "LMCACHE_GROUP_LEADER": "qwen-engine-0-0.qwen-engine",
        "LMCACHE_GROUP_PORT": "9466",
        "LMCACHE_GROUP_RANKS": "2",
        "LMCACHE_GROUP_READY_PORT": "9467",
        "LMCACHE_GROUP_SERVER_PORT": "8000",
        "LMCACHE_GROUP_SHUTDOWN_SECONDS": "60",
        "LMCACHE_GROUP_NOTICE_SECONDS": "10",
        "LMCACHE_GROUP_SECRET_FILE": str(tmp_path / "secret"),
        "VLLM_HOST_IP": "10.0.0.7",
    }


@pytest.mark.parametrize(("rank", "start"), [("0", 0), ("1", 2)])
def test_vllm_gets_the_options_of_its_part(environ, rank, start) -> None:
    settings = read(environ | {"LMCACHE_GROUP_RANK": rank}, COMMAND)
    assert settings.command_with("fd00::7") == [
        *("python3", "serve"),
        "--data-parallel-address=fd00::7",
        "--data-parallel-rpc-port=29550",
        "--data-parallel-size-local=2",
        f"--data-parallel-start-rank={start}",
        "--data-parallel-hybrid-lb",
    ]


def test_one_rank_on_each_pod_has_external_load_balancing(environ) -> None:
    """With other options, vLLM fails for a dense model without a reason."""
    command = read(environ | {"LMCACHE_GROUP_RANKS": "1"}, COMMAND).command_with("10.0.0.1")
    assert command[2:] == [
        "--data-parallel-address=10.0.0.1",
        "--data-parallel-rpc-port=29550",
        "--data-parallel-rank=1",
    ]


@pytest.mark.parametrize(("rank", "more"), [("0", []), ("1", ["--headless", "--api-server-count=0"])])
def test_a_rank_over_all_pods_has_one_server(environ, rank, more) -> None:
    settings = read(environ | {"LMCACHE_GROUP_RANK": rank, "LMCACHE_GROUP_RANKS": "0"}, COMMAND)
    place = ["--nnodes=2", f"--node-rank={rank}", "--master-addr=10.0.0.1", "--master-port=29501"]
    assert settings.command_with("10.0.0.1")[2:] == [*place, *more]
    assert (settings.is_headless, settings.server_port) == (bool(more), 8000)


def test_groups_with_one_secret_have_their_keys(environ) -> None:
    """Otherwise, a part could join another group at the former address of its leader."""
    groups = [environ, environ | {"LMCACHE_GROUP_LEADER": "qwen-engine-1-0.qwen-engine"}]
    keys = {read(each, COMMAND).key() for each in groups}
    assert len(keys) == 2
    assert read(environ | {"LMCACHE_GROUP_RANK": "0"}, COMMAND).key() in keys


def test_values_of_the_environment(environ) -> None:
    settings = read(environ | {"LMCACHE_GROUP_REVISION": "r1"}, COMMAND)
    assert settings.identity[:3] == (1, 2, "r1")
    assert (settings.leader, settings.port) == ("qwen-engine-0-0.qwen-engine", 9466)
    assert (settings.ready_port, settings.notice_seconds, settings.drain_seconds) == (9467, 10, 75)
    assert read(environ, COMMAND).identity.revision == "-"
    assert read(environ | {"VLLM_HOST_IP": "fd00::7"}, COMMAND).address == "fd00::7"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"LMCACHE_GROUP_NODES": "1"}, "LMCACHE_GROUP_NODES: '1' is not a number from 2 to 32"),
        ({"LMCACHE_GROUP_RANK": "2"}, "LMCACHE_GROUP_RANK: '2' is not a rank from 0 to 1"),
        ({"LMCACHE_GROUP_RANK": ""}, "LMCACHE_GROUP_RANK is not set"),
        ({"LMCACHE_GROUP_LEADER": ""}, "LMCACHE_GROUP_LEADER is not set"),
        ({"LMCACHE_GROUP_PORT": "x"}, "LMCACHE_GROUP_PORT: 'x' is not a port from 1 to 65535"),
        ({"LMCACHE_GROUP_READY_PORT": "0"}, "LMCACHE_GROUP_READY_PORT: '0' is not a port from 1 to 65535"),
        ({"LMCACHE_GROUP_NOTICE_SECONDS": ""}, "LMCACHE_GROUP_NOTICE_SECONDS is not set"),
        ({"VLLM_HOST_IP": "pod-1"}, "VLLM_HOST_IP: 'pod-1' does not appear to be an IPv4 or IPv6 address"),
        ({"LMCACHE_GROUP_SECRET_FILE": "/none"}, "cannot read /none: No such file or directory"),
        ({"LMCACHE_GROUP_RANKS": "-1"}, "LMCACHE_GROUP_RANKS: '-1' is not a number of ranks"),
        ({"LMCACHE_GROUP_SERVER_PORT": ""}, "LMCACHE_GROUP_SERVER_PORT is not set"),
        (
            {"LMCACHE_GROUP_SHUTDOWN_SECONDS": "x"},
            "LMCACHE_GROUP_SHUTDOWN_SECONDS: 'x' is not a number of seconds",
        ),
    ],
)
def test_mistakes_of_the_environment(environ, changes, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(environ | changes, COMMAND)


def test_a_short_secret_is_not_quoted(environ, tmp_path) -> None:
    with pytest.raises(ValueError, match="the secret needs 16 bytes or more") as error:
        read(environ | {"LMCACHE_GROUP_SECRET_FILE": str(tmp_path / "short")}, COMMAND)
    assert "0123" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: python3 -m lmcache_client.group -- vllm serve MODEL [OPTION ...]"),
        (["--"], "usage: python3 -m lmcache_client.group -- vllm serve MODEL [OPTION ...]"),
        (["vllm", "serve"], "usage: python3 -m lmcache_client.group -- vllm serve MODEL [OPTION ...]"),
        (["--", "vllmm"], "the command vllmm is not in PATH, or is not executable"),
    ],
)
def test_mistakes_of_the_command(environ, arguments, message) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        read(environ, arguments)
