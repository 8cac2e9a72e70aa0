"""The size of windows, which only the callers of the backend know."""

import pytest

from lmcache.engines.errors import UnsupportedError
from lmcache.engines.sglang import windows


class Component:
    def __init__(self, **fields):
        self.__dict__.update(fields)


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
    make(RadixCache(Component(), Component(full_window_pages=2))).attach()
    assert windows.window_pages() == 2


@pytest.mark.parametrize("components", [(), (Component(),), (Component(full_window_pages=0),)])
def test_unknown_window_is_refused(components):
    RadixCache(*components).attach()
    with pytest.raises(UnsupportedError, match="windows is not known"):
        windows.window_pages()


def test_windows_of_several_sizes_are_refused():
    RadixCache(Component(full_window_pages=2), Component(full_window_pages=3)).attach()
    with pytest.raises(UnsupportedError):
        windows.window_pages()
