"""The directory with the encryption keys of a tier, and handling of directories that are invalid."""

import contextlib
import logging
import os
import shutil
from pathlib import Path

import pytest

from lmcache_sidecar.config import read
from lmcache_sidecar.files.encryption_keys import KeysDirectory
from lmcache_sidecar.lower_tiers import open_tiers
from lmcache_sidecar.pages.stats import tier_part
from lmcache_store.tiers.errors import NoKeyError
from tests.harness.tiers.encryption import key_of, write_keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def directory(path: Path) -> KeysDirectory:
    return KeysDirectory(str(path), "--disk-encryption-keys-dir", "disk")


def test_follow_uses_the_present_keys(directory, path, caplog):
    caplog.set_level(logging.INFO)
    for present in ((1,), (1, 2), (2,), (2, 10)):
        write_keys(path, *present)
        directory.follow()
        expected = {"write_version": present[-1], "versions": list(present)}
        assert directory.facts == {"encryption": expected, "encryption_problem": ""}
        directory.cipher.check()
    assert "The set of encryption keys of the disk tier is versions 2, 10, and 10 encrypts" in caplog.text
    assert len(caplog.records) == 4
    directory.follow()
    assert len(caplog.records) == 4, "a set that did not change is not logged again"


def test_new_version_of_shared_rows_encrypts_after_the_delay(path, caplog):
    """Other pods that share rows may not have read it before."""
    caplog.set_level(logging.INFO)
    now = 0.0
    directory = KeysDirectory(str(path), "--remote-encryption-keys-dir", "remote", 180.0, lambda: now)
    write_keys(path, 1)
    directory.follow()
    for seconds, present, expected in [(500, (1, 2), 1), (679, (1, 2), 1), (680, (1, 2), 2), (681, (2,), 2)]:
        now = float(seconds)
        write_keys(path, *present)
        directory.follow()
        directory.follow()
        assert directory.facts["encryption"] == {"write_version": expected, "versions": list(present)}
    texts = [record.getMessage().partition(" is ")[2] for record in caplog.records]
    assert texts == [
        "version 1, and 1 encrypts",
        "versions 1, 2, and 1 encrypts",
        "versions 1, 2, and 2 encrypts",
        "version 2, and 2 encrypts",
    ]


def test_invalid_directory_does_not_stop_the_change_of_versions(path):
    now = 0.0
    directory = KeysDirectory(str(path), "--remote-encryption-keys-dir", "remote", 180.0, lambda: now)
    write_keys(path, 1, 2)
    directory.follow()
    (path / "3").write_text("not a key")
    now = 180.0
    directory.follow()
    assert directory.facts["encryption"] == {"write_version": 2, "versions": [1, 2]}


MISTAKES = {
    "no key": (lambda path: (path / "1").unlink(), "keys: has no key: add a file named 1"),
    "no directory": (
        lambda path: path.rename(path.with_name("elsewhere")),
        "keys can't be read: no such file or directory. Mount a Secret",
    ),
    "a folder": (lambda path: (path / "3").mkdir(), "keys/3 is not a file: remove it"),
    "a short key": (
        lambda path: (path / "2").write_text("ab"),
        "keys: 2 does not have 64 hexadecimal digits",
    ),
    "a huge file": (lambda path: (path / "2").write_text("a" * 9999), "keys: 2 does not have 64 hexadecimal"),
    "two spellings": (lambda path: (path / "01").write_bytes(b""), "keys: 01 and 1 are the same version"),
    "another name": (lambda path: (path / "tls.key").touch(), "keys: tls.key is not a version"),
}


@pytest.mark.parametrize(("damage", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_directory_keeps_the_last_keys(directory, path, caplog, damage, problem):
    write_keys(path, 1)
    directory.follow()
    damage(path)
    for _ in range(3):
        directory.follow()
    facts = directory.facts
    assert facts["encryption"] == {"write_version": 1, "versions": [1]}
    assert facts["encryption_problem"].startswith("--disk-encryption-keys-dir: ")
    assert problem in facts["encryption_problem"]
    assert key_of(1).hex() not in facts["encryption_problem"]
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1, "the same problem is logged once"
    assert "keys of the disk tier is still version 1, and 1 encrypts: --disk" in errors[0].getMessage()
    directory.cipher.check()


@pytest.mark.parametrize(("damage", "problem"), MISTAKES.values(), ids=MISTAKES)
def test_directory_that_was_never_valid_gives_no_key(directory, path, damage, problem):
    write_keys(path, 1)
    damage(path)
    directory.follow()
    with pytest.raises(NoKeyError, match=problem.rpartition("keys")[2]):
        directory.cipher.check()
    assert directory.facts["encryption"] == {"write_version": None, "versions": []}
    shutil.rmtree(path, ignore_errors=True)
    write_keys(path, 2)
    directory.follow()
    directory.cipher.check()
    assert directory.facts["encryption"]["versions"] == [2]


def test_mounted_secret_is_read_through_its_links(directory, path):
    """The kubelet replaces the link ``..data``. A link to a removed key remains for a moment."""
    path.mkdir()
    write_keys(path / "..first", 1, 2)
    write_keys(path / "..second", 2, 3)
    (path / "..data").symlink_to("..first")
    for version in (1, 2, 3):
        (path / str(version)).symlink_to(f"..data/{version}")
    directory.follow()
    assert directory.facts["encryption"]["versions"] == [1, 2]
    (path / "new").symlink_to("..second")
    os.replace(path / "new", path / "..data")
    directory.follow()
    assert (directory.facts["encryption"]["versions"], directory.problem) == ([2, 3], "")


def test_keys_without_their_tier_are_a_warning():
    """The spec of a pod may lose a tier while the pod still mounts the tier's keys."""
    for tier, needed in (("disk", "--disk-path"), ("remote", "--remote-url")):
        reading = read({f"{tier}_encryption_keys_dir": "/keys"}, {})
        expected = f"--{tier}-encryption-keys-dir has no effect without {needed}"
        assert (reading.mistakes, reading.warnings) == ((), (expected,))
        with contextlib.ExitStack() as opened:
            assert open_tiers(reading.usable(), opened) == {}


def test_tier_without_the_option_has_no_facts_of_encryption(tmp_path):
    with contextlib.ExitStack() as opened:
        handle = open_tiers(read({"disk_path": str(tmp_path)}, {}).usable(), opened)["disk"]
        assert "encryption" not in tier_part("disk", handle, None).facts
