"""Searches for the documents of a prompt, while the lookup thread still computes their keys."""

import threading

import pytest

from lmcache_client.core import lookups
from lmcache_client.core.requests import Ticket
from lmcache_client.vllm.blend import documents
from testing.child_process import wait_until
from tests.harness.client.blend_rig import FakeRequest, document, prompt


@pytest.mark.parametrize("search", ["find", "find_rows"])
def test_keys_that_become_known_after_a_search_do_not_lose_the_hit(rig, monkeypatch, search):
    for number in (1, 2):
        rig.store_rows(document(number))
    begins, hashed = threading.Event(), documents.hash_document
    if search == "find":
        rig.lookups.ask(Ticket("", [], b"", find_extra_keys=lambda: (begins.wait(60), ())[1]))
    else:
        monkeypatch.setattr(documents, "hash_document", lambda *args: begins.wait(60) and hashed(*args))
    request = FakeRequest(prompt(2, 1), "r", {"documents": [200, 200]})
    rig.session.memory_only = True  # the sidecar's answer would not make the request wait
    monkeypatch.setattr(lookups, "_FEW_KEYS", 0)
    rig.scheduler.on_new_request(request)
    if search == "find_rows":
        wait_until(lambda: rig.scheduler._states["r"].ticket.answer is not None, what="the prompt's lookup")
    searched = getattr(rig.lookups, search)

    def search_and_be_late(*args):
        rows = searched(*args)
        begins.set()
        rig.drain_lookups()
        return rows

    with monkeypatch.context() as patch:
        patch.setattr(rig.lookups, search, search_and_be_late)
        assert rig.match(request) == (None, False)
    assert rig.match(request) == (419, True)
