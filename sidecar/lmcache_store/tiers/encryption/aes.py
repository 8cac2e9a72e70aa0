"""AES-256-GCM with a key and a nonce of its own for each piece. The only module that needs ``cryptography``.

The functions of ``cryptography`` release the GIL while they encrypt and decrypt, and write into the caller's
memory without a copy.
"""

from __future__ import annotations

import os
import threading

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from lmcache_store.tiers.encryption.keys import KEY_BYTES, EncryptionKeys
from lmcache_store.tiers.encryption.pieces import (
    MAGIC,
    MARK_BYTES,
    OVERHEAD_BYTES,
    PREAMBLE_BYTES,
    SALT_BYTES,
    PiecePlace,
    pack_preamble,
    parse_preamble,
)
from lmcache_store.tiers.errors import InvalidObjectError, KeyAbsentError, NoKeyError
from lmcache_store.tiers.header import Buffer
from lmcache_store.tiers.pages import transfer_buffer

_NONCE_BYTES = 12


class AesGcm:
    """The cipher of one tier; see ``Cipher``. Without keys until ``use`` is called.

    ``domain`` names the tier ("disk", "remote"). One key gives other ciphertexts in each domain, and none is
    valid in another domain.
    """

    def __init__(self, domain: str, keys: EncryptionKeys | None = None) -> None:
        self.keys = keys
        """Keys in use. One assignment replaces them all, so that threads need no lock."""
        self.problem = "" if keys else "no encryption key was read yet"
        """See Cipher."""
        self._info = MAGIC + domain.encode()
        self._thread = threading.local()

    def use(self, keys: EncryptionKeys) -> None:
        """Use other keys from now on. Pieces in progress are completed with the earlier ones."""
        self.keys, self.problem = keys, ""

    def check(self) -> None:
        """See Cipher."""
        if self.keys is None:
            raise NoKeyError(self.problem)

    def buffer(self, num_bytes: int) -> memoryview:
        """See Cipher."""
        present: memoryview | None = getattr(self._thread, "buffer", None)
        if present is None or len(present) < num_bytes:
            present = self._thread.buffer = transfer_buffer(num_bytes)
        return present[:num_bytes]

    def encrypt(self, place: PiecePlace, content: Buffer, into: memoryview) -> None:
        """See Cipher."""
        keys = self.keys
        if keys is None:
            raise NoKeyError(self.problem)
        version, salt = keys.write_version, os.urandom(SALT_BYTES)
        aead, nonce = self._derive(keys.by_version[version], salt, place)
        into[:PREAMBLE_BYTES] = pack_preamble(version, salt)
        associated = place.associated_data(version, len(content))
        aead.encrypt_into(nonce, content, associated, into[PREAMBLE_BYTES:])

    def decrypt(self, place: PiecePlace, piece: memoryview, into: memoryview) -> None:
        """See Cipher."""
        version, salt = parse_preamble(piece)
        key = self.keys.by_version.get(version) if self.keys else None
        if key is None:
            raise KeyAbsentError(f"key version {version} is absent")
        if len(piece) != len(into) + OVERHEAD_BYTES:
            raise InvalidObjectError("length")
        aead, nonce = self._derive(key, salt, place)
        associated = place.associated_data(version, len(into))
        try:
            aead.decrypt_into(nonce, piece[PREAMBLE_BYTES:], associated, into)
        except InvalidTag:
            raise InvalidObjectError("authentication") from None

    def encrypt_marks(self, namespace: bytes, marks: bytes) -> bytes:
        """See Cipher. Each block has a mark and zeros: a single block needs no mode of operation."""
        self.check()
        keys = self.keys
        assert keys is not None
        blocks = np.frombuffer(marks, "<u8").repeat(2)
        blocks[1::2] = 0
        cipher = self._mark_cipher(keys.by_version[keys.write_version], namespace)
        return cipher.encryptor().update(blocks.tobytes())

    def decrypt_marks(self, namespace: bytes, encrypted: bytes) -> bytes:
        """See Cipher. With a wrong key, the second half of a block is hardly ever zero."""
        marks = np.zeros(len(encrypted) // (2 * MARK_BYTES), "<u8")
        is_valid = np.zeros(len(marks), np.bool_)
        for key in self.keys.by_version.values() if self.keys else ():
            decrypted = self._mark_cipher(key, namespace).decryptor().update(encrypted)
            blocks = np.frombuffer(decrypted, "<u8").reshape(-1, 2)
            is_zero = blocks[:, 1] == 0
            marks[is_zero] = blocks[is_zero, 0]
            is_valid |= is_zero
        return marks[is_valid].tobytes()

    def _mark_cipher(self, key: bytes, namespace: bytes) -> Cipher[modes.ECB]:
        info = self._info + b" marks" + namespace
        derived = HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=info).derive(key)
        return Cipher(algorithms.AES(derived), modes.ECB())

    def _derive(self, key: bytes, salt: bytes, place: PiecePlace) -> tuple[AESGCM, bytes]:
        """Derive the cipher and the nonce of one piece, also from the row key, which the medium hides."""
        info = self._info + place.object_id.row_key
        hkdf = HKDF(algorithm=SHA256(), length=KEY_BYTES + _NONCE_BYTES, salt=salt, info=info)
        derived = hkdf.derive(key)
        return AESGCM(derived[:KEY_BYTES]), derived[KEY_BYTES:]
