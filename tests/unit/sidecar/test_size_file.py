"""The file with the size that the memory tier is to have, and what becomes of a wrong one."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from lmcache_sidecar.followed import SizeFile

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory-size"


@pytest.fixture
def file(path: Path) -> SizeFile:
    return SizeFile(str(path), GIB, 4 * GIB)


def test_it_is_followed(file, path, caplog):
    caplog.set_level(logging.INFO)
    for text, size in (("2Gi\n", 2 * GIB), ("4294967296", 4 * GIB), ("1", 1), ("64Mi", 64 * MIB)):
        path.write_text(text)
        file.follow()
        assert (file.num_bytes, file.problem) == (size, "")
    assert "The size of the memory tier is 2Gi" in caplog.text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("4Gib", "memory-size: '4Gib' is not a size"),
        ("0", "'0' is not a size"),
        ("-1Gi", "'-1Gi' is not a size"),
        ("2Gi 3Gi", "'2Gi 3Gi' is not a size"),
        ("4.1Gi", "4.1Gi is more than 4Gi, to which the memory tier of this process can grow"),
        ("9999999999999Ti", "is more than 4Gi"),
        ("\0\0", "is not a size"),
    ],
)
def test_one_that_can_not_be_used_changes_nothing(file, path, caplog, text, problem):
    path.write_text("2Gi")
    file.follow()
    path.write_text(text)
    file.follow()
    file.follow()
    assert file.num_bytes == 2 * GIB
    assert problem in file.problem
    assert caplog.text.count("The size of the memory tier stays 2Gi") == 1
    path.write_text("2Gi")
    file.follow()
    assert file.problem == ""


def test_one_that_is_not_there_is_waited_for(file, path):
    file.follow()
    assert file.num_bytes == GIB
    assert "can't be read: no such file" in file.problem
    path.write_bytes(b"\xff\xfe")
    file.follow()
    assert file.num_bytes == GIB
    assert "can't be read" in file.problem
    path.write_text("512Mi")
    file.follow()
    assert (file.num_bytes, file.problem) == (512 * MIB, "")


def test_one_that_is_empty_asks_for_nothing(file, path):
    for text, size in (("", GIB), ("2Gi", 2 * GIB), ("\n", 2 * GIB)):
        path.write_text(text)
        file.follow()
        assert (file.num_bytes, file.problem) == (size, "")


def test_without_one_the_size_stays():
    file = SizeFile("", GIB, GIB)
    file.follow()
    assert (file.num_bytes, file.problem) == (GIB, "")


@given(st.text() | st.from_regex(r"[0-9.]{1,30}[KMGTi]{0,2}"))
@example("1e9")
def test_whatever_it_says_the_size_is_one_that_can_be(text):
    file = SizeFile("f", GIB, 4 * GIB)
    with contextlib.suppress(ValueError):
        file.use(text)
    assert 0 < file.num_bytes <= 4 * GIB
