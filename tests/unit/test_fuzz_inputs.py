"""Seeds and saved crashes of all fuzz targets, and the limits of a target."""

import pytest

from tests.fuzz import target
from tests.fuzz.target import Target, inputs, load, names, promise


@pytest.mark.parametrize("name", names())
def test_seeds_and_former_crashes_break_no_promise(name):
    target_ = load(name)
    paths = list(inputs(name))
    assert paths, f"{name} has no seeds in tests/fuzz/seeds"
    with target_.opened() as opened:
        target_.check(b"", opened)  # imports and caches count for no input
        for path in paths:
            try:
                target_.check_costs(path.read_bytes(), opened)
            except BaseException as error:
                error.add_note(f"input: {path}")
                raise


@pytest.mark.parametrize("name", names())
def test_docstring_names_the_promise(name):
    assert promise(name).endswith(".")


def test_input_that_raises_or_takes_too_much_is_a_crash(monkeypatch):
    first_byte = Target(lambda data: data[0], (KeyError,))
    first_byte.check_costs(b"x")
    with pytest.raises(IndexError):
        first_byte.check_costs(b"")
    Target(lambda data: data[0], (LookupError,)).check_costs(b"")  # a declared error is no crash
    monkeypatch.setattr(target, "MAX_BYTES", 1 << 20)
    with pytest.raises(AssertionError, match="bytes"):
        Target(lambda _: bytearray(2 << 20)).check_costs(b"")
    monkeypatch.setattr(target, "MAX_SECONDS", 0)
    with pytest.raises(AssertionError, match="takes more than 0 s"):
        Target(lambda _: None).check_costs(b"")
