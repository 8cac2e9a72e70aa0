"""The size of windows, which only the callers of the backend know."""

from types import SimpleNamespace

import pytest

from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang import windows


class RadixCache:
    """An object that calls the backend, as SGLang's radix cache does."""

    def __init__(self, *components):
        self.components = dict(enumerate(components))

    def attach(self):
        windows.note_radix_cache()


class Manager:
    """An object that has a radix cache, and raises an error for each field that it lacks."""

    def __init__(self, tree_cache):
        self.tree_cache = tree_cache

    def __getattr__(self, name):
        raise RuntimeError(name)

    def attach(self):
        windows.note_radix_cache()


@pytest.fixture(autouse=True)
def _new_process(monkeypatch):
    monkeypatch.setattr(windows, "_pages", set())


@pytest.mark.parametrize("make", [lambda cache: cache, Manager])
def test_window_of_the_caller_is_known_from_then_on(make):
    make(RadixCache(SimpleNamespace(), SimpleNamespace(full_window_pages=2))).attach()
    assert windows.window_pages() == 2


@pytest.mark.parametrize("pages", [(), (None,), (0,), (2, 3)], ids=str)
def test_windows_that_are_unknown_or_of_several_sizes_are_refused(pages):
    RadixCache(*(SimpleNamespace(**({} if n is None else {"full_window_pages": n})) for n in pages)).attach()
    with pytest.raises(UnsupportedError, match="windows"):
        windows.window_pages()
