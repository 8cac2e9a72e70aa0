"""SGLang servers to which the backend is attached again while they run."""

from __future__ import annotations

import pytest

from testing.engine.tiny_kinds import MELLUM
from testing.processes import SidecarProcess
from testing.sglang.engine import PAGE_TOKENS, lmcache_storage, make_prompt

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("one_thread")]


def test_windows_are_cached_after_sglang_froze_its_objects(start_sglang):
    """After its start, SGLang hides all objects from Python's garbage collector."""
    prompt = make_prompt(1000)
    with SidecarProcess(memory_size="256Mi") as sidecar:
        storage = lmcache_storage(sidecar.socket_path)
        engine = start_sglang(storage, model=MELLUM.path)
        engine.request("POST", "/freeze_gc")
        engine.detach()
        engine.attach(storage)
        cold = engine.generate(prompt)
        engine.wait_stored(15 * PAGE_TOKENS)
        engine.flush_cache()
        loaded = engine.generate(prompt)
    assert loaded.cached["storage"] == 15 * PAGE_TOKENS
    assert loaded.tokens == cold.tokens
