"""Encryption keys and the cipher: what it accepts, and everything that it must refuse."""

import hashlib
import hmac
import os

import hypothesis.strategies as st
import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import WriteVersions, parse_keys
from lmcache_store.tiers.encryption.pieces import OVERHEAD_BYTES, PiecePlace, stored_key
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError, NoKeyError
from tests.harness.tiers.encryption import cipher, flipped, key_of, keys

REFUSALS = (InvalidObjectError, KeyAbsentError)
OBJECT = ObjectId(b"n" * 32 + b"k" * 32, 3)
PLACE = PiecePlace(OBJECT, 1000, 100)
CONTENT = bytes(range(40))
HEX = b"0123456789abcdefABCDEF" + b"0" * 42


def encrypted(place: PiecePlace = PLACE, content: bytes = CONTENT, by: AesGcm | None = None) -> bytes:
    piece = memoryview(bytearray(len(content) + OVERHEAD_BYTES))
    (by or cipher("disk", 1)).encrypt(place, content, piece)
    return bytes(piece)


def decrypted(
    piece: bytes, place: PiecePlace = PLACE, by: AesGcm | None = None, length: int | None = None
) -> bytes:
    into = memoryview(bytearray(len(piece) - OVERHEAD_BYTES if length is None else length))
    (by or cipher("disk", 1)).decrypt(place, memoryview(piece), into)
    return bytes(into)


def is_accepted(piece: bytes, place: PiecePlace = PLACE, by: AesGcm | None = None) -> bool:
    try:
        decrypted(bytes(piece), place, by, len(CONTENT))
    except REFUSALS:
        return False
    return True


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param(
            [([1], 0.0, 1), ([1, 2], 1000.0, 1), ([1, 2], 1179.9, 1), ([1, 2], 1180.0, 2)], id="delay"
        ),
        pytest.param([([1, 2, 3], 50.0, 1), ([1, 2, 3], 230.0, 3)], id="the lowest of several at a start"),
        pytest.param([([9], 0.0, 9), ([5, 9], 1.0, 9)], id="a lower number waits, too"),
        pytest.param([([1], 0.0, 1), ([1, 2], 1000.0, 1), ([2], 1001.0, 2)], id="all others were removed"),
        pytest.param(
            [([1, 2], 0.0, 1), ([1, 2], 200.0, 2), ([1], 201.0, 1), ([1, 2], 202.0, 1)], id="new again"
        ),
    ],
)
def test_a_new_version_encrypts_after_the_delay(steps):
    choice = WriteVersions(delay_seconds=180.0)
    assert [choice.choose(versions, now) for versions, now, _ in steps] == [chosen for *_, chosen in steps]


def test_without_a_delay_the_highest_version_encrypts():
    assert WriteVersions(0.0).choose([1, 2, 3], 0.0) == 3


class TestKeys:
    def test_highest_version_encrypts(self):
        parsed = parse_keys({"9": HEX, "10": key_of(1).hex().encode() + b"\n"})
        assert parsed.by_version == {9: bytes.fromhex(HEX.decode()), 10: key_of(1)}
        assert (parsed.write_version, parsed.versions) == (10, [9, 10])

    def test_repr_contains_no_key(self):
        assert repr(keys(7)) == "EncryptionKeys(write_version=7)"

    @pytest.mark.parametrize(
        ("files", "mistake"),
        [
            ({}, "has no key: add a file named 1, and write the output of 'openssl rand -hex 32' to it"),
            ({"1": b""}, "1 does not have 64 hexadecimal digits: write the output of 'openssl rand -hex 32'"),
            ({"1": HEX[:-1]}, "1 does not have 64"),
            ({"1": HEX + b"0"}, "1 does not have 64"),
            ({"1": HEX + b"\n\n"}, "1 does not have 64"),
            ({"1": b" " + HEX}, "1 does not have 64"),
            ({"1": HEX[:-1] + b"g"}, "1 does not have 64"),
            ({"1": HEX[:-2] + "٣".encode()}, "1 does not have 64"),
            ({"1": bytes.fromhex(HEX.decode())}, "1 does not have 64"),
            ({"0": HEX}, "0 is not a version: name each key by a number from 1 to 4294967295, such as 1"),
            ({"01": HEX}, "01 is not a version"),
            ({"1": HEX, "01": HEX}, "01 and 1 are the same version: remove 01"),
            ({"1": HEX, "+1": HEX}, r"\+1 and 1 are the same version"),
            ({"4294967296": HEX}, "4294967296 is not a version"),
            ({"٣": HEX}, "٣ is not a version"),
            ({"key": HEX}, "key is not a version"),
            ({"1": HEX, "2": HEX.lower()}, "2 has the same key as 1"),
        ],
    )
    def test_mistake_is_refused(self, files, mistake):
        with pytest.raises(ValueError, match=f"^{mistake}"):
            parse_keys(files)


class TestCipher:
    @given(content=st.binary(max_size=300), total=st.integers(0, 1 << 50), start=st.integers(0, 1 << 50))
    def test_decrypts_what_it_encrypted(self, content, total, start):
        place = PiecePlace(OBJECT, total, start)
        piece = encrypted(place, content)
        assert len(piece) == len(content) + OVERHEAD_BYTES
        assert decrypted(piece, place) == content
        assert len(content) < 8 or content not in piece

    def test_format_does_not_change(self, monkeypatch):
        """An independent implementation of the format, in which rows of other releases are stored."""
        salt = bytes(range(24))
        monkeypatch.setattr(os, "urandom", lambda number: salt[:number])
        extracted = hmac.digest(salt, key_of(1), hashlib.sha256)
        info = b"LMe1remote" + OBJECT.row_key
        first = hmac.digest(extracted, info + b"\x01", hashlib.sha256)
        second = hmac.digest(extracted, first + info + b"\x02", hashlib.sha256)
        numbers = b"".join(number.to_bytes(8, "little") for number in (1000, 100, len(CONTENT)))
        associated = b"LMe1" + (1).to_bytes(4, "little") + bytes(OBJECT) + numbers + b"\0"
        ciphertext = AESGCM(first).encrypt(second[:12], CONTENT, associated)
        expected = b"LMe1" + (1).to_bytes(4, "little") + salt + ciphertext
        assert encrypted(by=cipher("remote", 1)) == expected

    def test_every_flipped_bit_is_refused(self):
        piece = encrypted(by=cipher("disk", 1, 3))
        reader = cipher("disk", 1, 2, 3)  # version 3 with one bit flipped is 1 or 2
        assert is_accepted(piece, by=reader)
        assert not [bit for bit, damaged in enumerate(flipped(piece)) if is_accepted(damaged, by=reader)]

    def test_every_flipped_bit_of_the_name_is_refused(self):
        piece = encrypted()
        for name in flipped(OBJECT):
            other = ObjectId(bytes(name[:64]), int.from_bytes(name[64:], "big"))
            assert not is_accepted(piece, PLACE._replace(object_id=other))

    @pytest.mark.parametrize(
        "change",
        [{"total_bytes": 1001}, {"start": 0}, {"start": 99}, {"is_header": True}, {"total_bytes": 0}],
        ids=str,
    )
    def test_piece_of_another_place_is_refused(self, change):
        assert not is_accepted(encrypted(), PLACE._replace(**change))
        assert not is_accepted(encrypted(PLACE._replace(**change)))

    def test_piece_of_another_domain_or_key_is_refused(self):
        other_key = AesGcm("disk", parse_keys({"1": key_of(2).hex().encode()}))
        for forger in (cipher("remote", 1), other_key):
            assert not is_accepted(encrypted(by=forger))

    def test_truncated_and_extended_pieces_are_refused(self):
        piece = encrypted()
        for length in range(len(piece)):
            assert not is_accepted(piece[:length])
            shorter = max(0, length - OVERHEAD_BYTES)
            with pytest.raises(InvalidObjectError):
                decrypted(piece[:length], length=shorter)
        assert not is_accepted(piece + b"\0")
        with pytest.raises(InvalidObjectError):
            decrypted(piece + b"\0")

    def test_absent_version_and_invalid_piece_are_different_errors(self):
        with pytest.raises(KeyAbsentError, match="key version 2 is absent"):
            decrypted(encrypted(by=cipher("disk", 2)))
        with pytest.raises(InvalidObjectError, match="not encrypted"):
            decrypted(bytes(100))

    def test_cipher_without_a_key_encrypts_nothing(self):
        piece = memoryview(bytearray(len(CONTENT) + OVERHEAD_BYTES))
        with pytest.raises(NoKeyError):
            AesGcm("disk").encrypt(PLACE, CONTENT, piece)
        assert bytes(piece) == bytes(len(piece))

    def test_key_and_nonce_never_repeat(self, monkeypatch):
        derive, derived = AesGcm._derive, []

        def note(self, key, salt, place):
            derived.append((self._info, key, salt, place))
            return derive(self, key, salt, place)

        monkeypatch.setattr(AesGcm, "_derive", note)
        pieces = [encrypted(by=tier) for tier in (cipher("disk", 1), cipher("disk", 1)) for _ in range(2000)]
        assert len(set(derived)) == len(derived) == len(pieces)
        assert len({piece[:32] for piece in pieces}) == len(pieces)
        assert len({piece[32:] for piece in pieces}) == len(pieces)

    def test_names_of_rows_do_not_change(self):
        name = stored_key(OBJECT.row_key)
        assert name[:32] == b"n" * 32, "people find the rows of a model by its namespace"
        assert name[32:] == hashlib.sha256(b"lmcache encrypted name 1" + OBJECT.row_key).digest()

    def test_key_and_name_of_a_row_decrypt_nothing_without_its_row_key(self):
        """A reader of a medium knows the name. Only prompt and cache salt lead to the row key."""
        named = ObjectId(stored_key(OBJECT.row_key), OBJECT.column)
        piece = encrypted()
        assert not is_accepted(piece, PLACE._replace(object_id=named))
        associated = PLACE.associated_data(1, len(CONTENT))
        aead, nonce = cipher("disk", 1)._derive(key_of(1), piece[8:32], PLACE._replace(object_id=named))
        with pytest.raises(InvalidTag):
            aead.decrypt(nonce, piece[32:], associated)
        aead, nonce = cipher("disk", 1)._derive(key_of(1), piece[8:32], PLACE)
        assert aead.decrypt(nonce, piece[32:], associated) == CONTENT


MARKS = b"".join(mark.to_bytes(8, "little") for mark in (0, 1, 1 << 63, (1 << 64) - 1))
NAMESPACE = b"n" * 32


def test_marks_are_encrypted_into_equal_blocks_that_only_their_key_decrypts():
    """The blocks are a format: the pods of two releases share a set."""
    ours = cipher("remote", 1, 2)
    encrypted = ours.encrypt_marks(NAMESPACE, MARKS)
    assert (
        hashlib.sha256(encrypted).hexdigest()
        == "6ecb29ffe7c342cdd5d7f426ed9c7e6f63bc839f863e84c632e4d3a435fc9b02"
    )
    assert encrypted == cipher("remote", 2).encrypt_marks(NAMESPACE, MARKS)
    assert len(encrypted) == 2 * len(MARKS)
    assert len({encrypted[start : start + 16] for start in range(0, 64, 16)}) == 4
    older = cipher("remote", 1).encrypt_marks(NAMESPACE, MARKS)
    assert ours.decrypt_marks(NAMESPACE, older[:16] + bytes(16) + encrypted[16:]) == MARKS
    assert older != encrypted
    for other in (cipher("disk", 2), cipher("remote", 1), AesGcm("remote")):
        assert other.decrypt_marks(NAMESPACE, encrypted) == b""
    assert ours.decrypt_marks(b"m" * 32, encrypted) == b""
    assert ours.decrypt_marks(NAMESPACE, b"") == ours.encrypt_marks(NAMESPACE, b"") == b""
    accepted = [
        damaged
        for damaged in flipped(encrypted[:16], range(128))
        if ours.decrypt_marks(NAMESPACE, bytes(damaged))
    ]
    assert not accepted
    with pytest.raises(NoKeyError):
        AesGcm("remote").encrypt_marks(NAMESPACE, MARKS)
