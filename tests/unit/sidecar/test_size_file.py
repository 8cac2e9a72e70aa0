"""The file with the target size of the memory tier, and handling of invalid files."""

import contextlib
import logging
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import example, given
from lmcache_sidecar.watched_files import SizeFile

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory-size"


@pytest.fixture
def file(path: Path) -> SizeFile:
    return SizeFile(str(path), GIB, 4 * GIB)


def test_follow_applies_changes_of_the_file(file, path, caplog):
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
        ("4.1Gi", "4.1Gi is more than 4Gi, the largest size of this process"),
        ("9999999999999Ti", "is more than 4Gi"),
        ("\0\0", "is not a size"),
    ],
)
def test_invalid_file_keeps_the_size(file, path, caplog, text, problem):
    path.write_text("2Gi")
    file.follow()
    path.write_text(text)
    file.follow()
    file.follow()
    assert file.num_bytes == 2 * GIB
    assert problem in file.problem
    assert caplog.text.count("The size of the memory tier is still 2Gi") == 1
    path.write_text("2Gi")
    file.follow()
    assert file.problem == ""


def test_missing_file_keeps_the_size_until_it_exists(file, path):
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


def test_empty_file_keeps_the_size(file, path):
    for text, size in (("", GIB), ("2Gi", 2 * GIB), ("\n", 2 * GIB)):
        path.write_text(text)
        file.follow()
        assert (file.num_bytes, file.problem) == (size, "")


def test_size_is_fixed_without_a_file():
    file = SizeFile("", GIB, GIB)
    file.follow()
    assert (file.num_bytes, file.problem) == (GIB, "")


@given(st.text() | st.from_regex(r"[0-9.]{1,30}[KMGTi]{0,2}"))
@example("1e9")
def test_random_text_keeps_the_size_within_limits(text):
    file = SizeFile("f", GIB, 4 * GIB)
    with contextlib.suppress(ValueError):
        file.use(text)
    assert 0 < file.num_bytes <= 4 * GIB
