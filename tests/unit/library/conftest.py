"""Fixtures shared by the tests of the library."""

import pytest

from lmcache.storage_backend import remote_backend
from lmcache.storage_backend.local_backend import LMCLocalBackend, LMCLocalDiskBackend
from tests.harness.library.dict_connector import DictConnector
from tests.harness.library.kv_cache import FORMATS, make_config, make_pool
from tests.harness.tiers.disk_world import patient_stores

__all__ = ["patient_stores"]

REMOTE = {"remote_url": "lm://localhost:1", "remote_serde": "safetensor"}
KINDS = {
    "memory": ("cpu", {}),
    "disk": ("disk", {}),
    "remote": (None, REMOTE),
    "pipelined": (None, {**REMOTE, "pipelined_backend": True}),
    "hybrid": ("cpu", REMOTE),
    "pipelined hybrid": ("cpu", {**REMOTE, "pipelined_backend": True}),
    "hybrid with disk": ("disk", REMOTE),
}


@pytest.fixture
def connector(monkeypatch):
    """The remote store of all backends."""
    connector = DictConnector()
    monkeypatch.setattr(remote_backend, "CreateConnector", lambda url: connector)
    return connector


@pytest.fixture(params=KINDS)
def config(request, tmp_path, connector):
    """A configuration of each kind of backend."""
    device, options = KINDS[request.param]
    return make_config(str(tmp_path / "cache") if device == "disk" else device, **options)


@pytest.fixture(params=FORMATS)
def fmt(request):
    return request.param


@pytest.fixture(params=["memory", "disk"])
def make_backend(request, tmp_path):
    """Open local backends for a number of full chunks."""
    backends = []

    def make(num_chunks: float = 8):
        kind: type[LMCLocalBackend | LMCLocalDiskBackend]
        kind, device = LMCLocalBackend, "cpu"
        if request.param == "disk":
            kind, device = LMCLocalDiskBackend, str(tmp_path / "cache")
        backends.append(kind(make_config(device), make_pool(num_chunks), "cpu"))
        return backends[-1]

    yield make
    for backend in backends:
        backend.close()
