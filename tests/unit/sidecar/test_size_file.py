"""The file with the target size of the memory tier, and handling of invalid files."""

import logging
from pathlib import Path

import pytest

from lmcache_sidecar.files.watched_files import SizeFile

MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "memory-size"


@pytest.fixture
def file(path: Path) -> SizeFile:
    return SizeFile(str(path), GIB, 4 * GIB)


def follow(file: SizeFile, path: Path, content: str | bytes) -> tuple[int, str]:
    """Use a file with this content. Returns the size and the problem."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    file.follow()
    return file.num_bytes, file.problem


def test_follow_applies_changes_of_the_file_and_ignores_an_empty_one(file, path, caplog):
    caplog.set_level(logging.INFO)
    sizes = {"": GIB, "2Gi\n": 2 * GIB, "4294967296": 4 * GIB, "1": 1, "64Mi": 64 * MIB, "\n": 64 * MIB}
    for text, size in sizes.items():
        assert follow(file, path, text) == (size, "")
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
    follow(file, path, "2Gi")
    for _ in range(2):
        size, reported = follow(file, path, text)
        assert size == 2 * GIB
        assert problem in reported
    assert caplog.text.count("The size of the memory tier is still 2Gi") == 1
    assert follow(file, path, "2Gi") == (2 * GIB, "")


def test_missing_or_unreadable_file_keeps_the_size(file, path):
    file.follow()
    assert "can't be read: no such file" in file.problem
    size, problem = follow(file, path, b"\xff\xfe")
    assert size == GIB
    assert "can't be read" in problem
    assert follow(file, path, "512Mi") == (512 * MIB, "")


def test_size_is_fixed_without_a_file():
    file = SizeFile("", GIB, GIB)
    file.follow()
    assert (file.num_bytes, file.problem) == (GIB, "")
