"""A disk tier whose files are encrypted: damage, rotation, restarts, and files of the other format."""

from functools import partial

import pytest

from lmcache_store.tiers.base import ObjectId, OwnerBound
from lmcache_store.tiers.disk.file_formats import PIECE_BYTES, EncryptedFiles, PlainFiles
from lmcache_store.tiers.disk.files import Directory
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import EncryptionKeys
from lmcache_store.tiers.encryption.pieces import OVERHEAD_BYTES
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError
from lmcache_store.tiers.header import HEADER_BYTES, digests
from lmcache_store.tiers.probing import num_leading
from lmcache_store.tiers.tiered.tier_worker import _load_columns, _store_columns
from tests.harness.tiers.disk_world import MIB, PAGE, content, file_of, key_of, load, store, taken_bytes
from tests.harness.tiers.encryption import cipher, flipped, keys
from tests.harness.tiers.encryption import key_of as encryption_key_of

MARKER_BYTES = HEADER_BYTES + OVERHEAD_BYTES
encrypted = partial(file_of, is_encrypted=True)


def test_every_flipped_bit_is_refused(tmp_path):
    directory, object_id = Directory(str(tmp_path), cipher("disk", 1)), ObjectId(key_of(1), 0)
    file, into = encrypted(tmp_path, 1), memoryview(bytearray(PAGE))
    directory.publish(
        directory.write(object_id, memoryview(content(1, 100)), b"label"), directory.stored_id(object_id)
    )

    def is_accepted(damaged: bytes) -> bool:
        file.write_bytes(damaged)
        try:
            directory.read(object_id, into)
        except (InvalidObjectError, KeyAbsentError):
            return False
        return True

    written, end = file.read_bytes(), PAGE + 100 + OVERHEAD_BYTES
    assert is_accepted(written)
    bits = [*range(8 * MARKER_BYTES), *range(8 * PAGE, 8 * end)]
    accepted = [number for number, damaged in enumerate(flipped(written, bits)) if is_accepted(damaged)]
    assert not accepted
    padding = written[MARKER_BYTES:PAGE] + written[end:]
    assert padding == bytes(len(padding)), "the rest of the file is empty"
    directory.close()


def test_format_of_plain_files_refuses_an_encrypted_file(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        EncryptedFiles(cipher("disk", 1)).write(
            file.fileno(), ObjectId(key_of(1), 0), memoryview(b"x" * 100), b"label", b""
        )
        with pytest.raises(InvalidObjectError):
            PlainFiles().read(file.fileno(), ObjectId(key_of(1), 0), memoryview(bytearray(PAGE)), None)


class TestTier:
    @pytest.mark.parametrize("is_restarted", [False, True])
    def test_one_store_replaces_all_columns_under_an_absent_key(self, path, restart, is_restarted):
        used, row = cipher("disk", 1), key_of(1)
        tier = restart(MIB, used)
        payloads = [memoryview(content(number, PAGE)) for number in (1, 2, 3)]
        views = [memoryview(bytearray(PAGE)) for _ in payloads]
        known, bound = list(map(digests, payloads)), OwnerBound(b"", 0)
        assert _store_columns(tier, row, payloads, b"", known, bound)
        if is_restarted:  # no load shows which columns can't be read
            tier = restart(MIB, cipher("disk", 2))
            assert tier.indexed.wait(60)
        else:
            used.use(keys(2))
            assert not _load_columns(tier, row, views, PAGE)
        assert _store_columns(tier, row, payloads, b"", known, bound)
        assert len(_load_columns(tier, row, views, PAGE)) == 3
        assert views == payloads
        assert tier.stats.touched == 0
        assert tier.used_bytes == taken_bytes(path) == 3 * 3 * PAGE
        assert _store_columns(tier, row, payloads, b"", known, bound)
        assert tier.stats.touched == 3, "readable columns are not written again"

    def test_file_stays_while_its_key_is_absent(self, path, restart):
        tier = restart(MIB, cipher("disk", 1))
        assert store(tier, 1)
        tier = restart(MIB, cipher("disk", 2))
        assert load(tier, 1) is None
        assert not tier.health.is_open
        tier = restart(MIB, cipher("disk", 1))
        assert load(tier, 1) == content(1, PAGE)

    @pytest.mark.parametrize("reader", ["the right key", "a wrong key"])
    @pytest.mark.parametrize("damage", ["a flipped bit", "the file of another name", ""])
    def test_file_that_is_not_authentic_is_a_miss_and_is_deleted(self, path, restart, reader, damage):
        tier = restart(MIB, cipher("disk", 1))
        assert store(tier, 1)
        assert store(tier, 2)
        content_bytes = bytearray(encrypted(path, 1).read_bytes())
        content_bytes[PAGE + 99] ^= damage == "a flipped bit"
        other = encrypted(path, 2).read_bytes()
        encrypted(path, 1).write_bytes(other if "another" in damage else content_bytes)
        if reader == "a wrong key":
            tier = restart(MIB, AesGcm("disk", EncryptionKeys({1: encryption_key_of(9)}, 1)))
        is_authentic = (reader, damage) == ("the right key", "")
        assert load(tier, 1) == (content(1, PAGE) if is_authentic else None)
        assert tier.stats.invalid == ({} if is_authentic else {"authentication": 1})
        assert encrypted(path, 1).exists() == is_authentic

    @pytest.mark.parametrize("size", [PAGE, PIECE_BYTES + PAGE])
    def test_payload_that_changed_after_its_digests_is_a_miss(self, path, restart, size):
        tier, object_id = restart(64 * MIB, cipher("disk", 1)), ObjectId(key_of(1), 0)
        known, into = digests(content(1, size)), memoryview(bytearray(size))
        assert tier.store(object_id, memoryview(content(2, size)), b"label", known)
        assert tier.load(object_id, into, size) is None
        assert tier.stats.invalid == {"checksum": 1}
        assert not encrypted(path, 1).exists()
        assert tier.store(object_id, memoryview(content(1, size)), b"label", known)
        assert tier.load(object_id, into, size).digests == known
        assert into == content(1, size)

    def test_files_of_the_other_format_are_misses_until_they_are_evicted(self, path, restart):
        """Names of the formats differ, so neither format reads or replaces a file of the other one."""
        tier = restart(MIB, cipher("disk", 1))
        assert store(tier, 1)
        tier = restart(MIB)
        assert load(tier, 1) is None
        assert store(tier, 1)
        assert load(tier, 1) == content(1, PAGE)
        assert file_of(path, 1).exists()
        assert encrypted(path, 1).exists()
        tier = restart(MIB, cipher("disk", 1))
        assert load(tier, 1) == content(1, PAGE)
        assert (tier.stats.invalid, tier.stats.key_absent, tier.health.is_open) == ({}, 0, False)
        assert tier.indexed.wait(60)
        assert tier.used_bytes == taken_bytes(path) == 5 * PAGE
        for number in range(2, 2 * MIB // (3 * PAGE)):
            assert store(tier, number)
        assert not file_of(path, 1).exists()

    @pytest.mark.parametrize("is_encrypted", [True, pytest.param(False, id="a control")])
    def test_names_and_files_contain_no_plain_text_and_no_row_key(self, path, restart, is_encrypted):
        """Files and the cluster's key do not suffice to decrypt a row."""
        tier, key = restart(MIB, *[cipher("disk", 1)] * is_encrypted), key_of(7)[32:]
        assert tier.store(ObjectId(key_of(7), 0), memoryview(b"SECRET prompt " * 999), b"SECRET model")
        file = file_of(path, 7, is_encrypted=is_encrypted)
        raw = file.read_bytes()
        assert (raw.count(b"SECRET"), key in raw, key.hex() in str(file)) == (
            (0, False, False) if is_encrypted else (1000, True, True)
        )

    def test_rows_are_touched_by_their_row_keys(self, path, restart):
        tier = restart(MIB, cipher("disk", 1))
        assert all(store(tier, 1, column=column) for column in (0, 1))
        assert store(tier, 2)
        assert tier.touch([key_of(1), key_of(2), key_of(3)], 2) == {key_of(2), key_of(3)}
        assert num_leading(tier, [key_of(1), key_of(2)], 2) == 1
        bound = OwnerBound("owner", 4 * PAGE)
        tier.assign(ObjectId(key_of(1), 0), "owner")
        assert tier.bytes_by_owner() == {"owner": 3 * PAGE}
        assert tier.admits({ObjectId(key_of(1), 0): PAGE}, bound)
        assert not tier.admits({ObjectId(key_of(4), 0): PAGE}, bound)
        assert tier.remove(ObjectId(key_of(1), 0))
        assert not tier.contains(ObjectId(key_of(1), 0))

    def test_padding_has_no_bytes_of_earlier_pieces(self, path):
        """A thread encrypts all its pieces in one buffer, and a shorter piece follows a longer one."""
        directory = Directory(str(path), cipher("disk", 1))
        try:
            for number, size in ((1, 3 * PAGE), (2, 10)):
                object_id = ObjectId(key_of(number), 0)
                payload = memoryview(b"x" * size)
                directory.publish(directory.write(object_id, payload, b""), directory.stored_id(object_id))
            assert encrypted(path, 2).read_bytes()[PAGE + 10 + OVERHEAD_BYTES :] == bytes(
                PAGE - 10 - OVERHEAD_BYTES
            )
        finally:
            directory.close()
