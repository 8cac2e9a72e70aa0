"""Seeds and saved crashes of all fuzz targets, and the limits of a target."""

import pytest

from tests.fuzz import target
from tests.fuzz.target import Target, inputs, load, names, promise


@pytest.mark.parametrize("name", names())
def test_seeds_and_former_crashes_break_no_promise(name):
    target_ = load(name)
    paths = list(inputs(name))
    assert paths, f"{name} has no seeds in tests/fuzz/seeds"
    with target_.opened():
        target_.check(b"")  # imports and caches count for no input
        for path in paths:
            try:
                target_.check_costs(path.read_bytes())
            except BaseException as error:
                error.add_note(f"input: {path}")
                raise


@pytest.mark.parametrize("name", names())
def test_docstring_names_the_promise(name):
    assert promise(name).endswith(".")


def test_unexpected_error_is_a_crash():
    crashing = Target(lambda data: data[0], (KeyError,))
    crashing.check_costs(b"x")
    with pytest.raises(IndexError):
        crashing.check_costs(b"")


def test_declared_error_is_no_crash():
    Target(lambda data: data[0], (LookupError,)).check_costs(b"")


def test_large_allocation_is_a_crash(monkeypatch):
    monkeypatch.setattr(target, "MAX_BYTES", 1 << 20)
    Target(lambda data: bytearray(len(data))).check_costs(b"x")
    with pytest.raises(AssertionError, match="bytes"):
        Target(lambda _: bytearray(2 << 20)).check_costs(b"")


def test_long_run_is_a_crash(monkeypatch):
    monkeypatch.setattr(target, "MAX_SECONDS", 0)
    with pytest.raises(AssertionError, match="takes more than 0 s"):
        Target(lambda _: None).check_costs(b"")
