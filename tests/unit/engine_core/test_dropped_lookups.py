"""Loads after lookups that the engine dropped: a request with the same first pages was aborted."""

import pytest

from lmcache.engines.core.page_requests import PageRequest, PageRequests
from lmcache.kv_groups import GroupKind, KVGroup

GROUPS = (KVGroup(0, 64, 4096, 0, GroupKind.FULL_ATTENTION),)
PAGES = [bytes([number]) * 32 for number in range(20)]


def looked_up(num_pages, num_hits):
    request = PageRequest(f"{num_pages}", b"n" * 32, tuple(PAGES[:num_pages]), GROUPS, 0.0)
    request.num_hits = num_hits
    return request


@pytest.fixture
def requests():
    return PageRequests(10.0)


def test_load_belongs_to_the_lookup_that_found_all_of_its_pages(requests):
    """The sidecar promotes the later pages for the second lookup only, so the load must ask for that one."""
    dropped, waiting = looked_up(10, 10), looked_up(20, 20)
    requests.add(dropped)
    requests.add(waiting)
    assert requests.find(0, PAGES[0], PAGES[19]) is waiting
    assert requests.find(0, PAGES[0], PAGES[9]) is dropped


def test_load_of_more_pages_than_any_lookup_found_belongs_to_the_oldest(requests):
    oldest = looked_up(20, 10)
    requests.add(oldest)
    requests.add(looked_up(10, 10))
    assert requests.find(0, PAGES[0], PAGES[15]) is oldest
    assert requests.find(0, PAGES[12], PAGES[15]) is None
