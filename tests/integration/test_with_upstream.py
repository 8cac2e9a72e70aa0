"""The client with LMCache's own package of the name lmcache, in one interpreter and in one engine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.child import CHILDREN, Peer, site_packages
from testing.child_process import REPOSITORY
from testing.engine import upstream
from testing.engine.process import EngineProcess, multi_config, patient_config
from testing.processes import SidecarProcess
from tests.harness.client.real_engine import CHUNK, assert_loaded, make_prompt
from tools import payload

pytestmark = pytest.mark.vllm

NUM_CHUNKS = 2
QUIET = {"LMCACHE_TRACK_USAGE": "false"}
"""Environment in which upstream's package reports nothing to its authors."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The payload without its bundles: the packages that a pod's engine gets."""
    folder = tmp_path_factory.mktemp("payload") / "out"
    payload.copy_packages(folder)
    return folder


def test_both_packages_can_be_imported(client: Path) -> None:
    path = [client, upstream.package()]
    code = (
        "import lmcache_client.vllm.connector, lmcache.v1.config\n"
        "import lmcache.integration.vllm.vllm_multi_process_adapter\n"
        "print(lmcache.__file__, lmcache_client.__file__)"
    )
    environment = os.environ | QUIET | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    argv = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(argv, env=environment, cwd="/", capture_output=True, text=True, check=True)
    folders = [str(Path(file).parent) for file in done.stdout.splitlines()[-1].split()]
    assert folders == [str(path[1] / "lmcache"), str(path[0] / "lmcache_client")]


class _Engine(EngineProcess):
    child = (CHILDREN / "engine.py", REPOSITORY / "testing" / "engine" / "child.py")

    def __init__(self, log: Path, connector: dict[str, object], client: Path) -> None:
        # This folder is first. The child runs in it, because the checkout contains our library.
        self.python_path = upstream.package()
        path = [self.python_path, client, site_packages(upstream.VERSION), REPOSITORY]
        folders = os.pathsep.join(map(str, path))
        super().__init__(log, connector, {**QUIET, "PYTHONPATH": folders})


@pytest.fixture(scope="module")
def server() -> Iterator[int]:
    """The port of upstream's server."""
    with Peer(upstream.VERSION, "server.py", "serve") as peer:
        yield int(peer.round()["port"])


@pytest.mark.rotating
@pytest.mark.parametrize("is_first", [True, False], ids=["ours first", "ours last"])
def test_one_engine_runs_both_connectors(
    sidecar: SidecarProcess, server: int, client: Path, tmp_path: Path, is_first: bool
) -> None:
    theirs = {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server},
    }
    both = [patient_config(sidecar.socket_path), theirs]
    with _Engine(tmp_path / "log", multi_config(*(both if is_first else both[::-1])), client) as engine:
        prompt = make_prompt(NUM_CHUNKS * CHUNK + 26, seed=is_first)
        (computed,) = engine.generate(prompt)
        assert computed.num_cached_tokens == 0
        engine.generate(prompt)  # in a MultiConnector, the engine's identity follows with the first step
        sidecar.wait_until(lambda stats: stats["memory"]["used_rows"] == NUM_CHUNKS)
        sidecar.wait_usable()
        engine.scrub_kv()
        (hit,) = engine.generate(prompt)
    assert_loaded(hit, computed, NUM_CHUNKS * CHUNK)
