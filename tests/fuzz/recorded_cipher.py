"""A cipher that remembers what it encrypted, so that a fuzz target knows which bytes are genuine."""

from collections.abc import Callable, Iterable

from lmcache_store.tiers.base import ObjectId
from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.pieces import PiecePlace
from lmcache_store.tiers.header import Buffer, parse


class RecordedCipher(AesGcm):
    """The cipher of a tier, with the content of each piece by its place and its encrypted bytes."""

    def __init__(self, domain: str) -> None:
        super().__init__(domain)
        self.contents: dict[tuple[PiecePlace, bytes], bytes] = {}

    def encrypt(self, place: PiecePlace, content: Buffer, into: memoryview) -> None:
        """See Cipher."""
        super().encrypt(place, content, into)
        self.contents[place, bytes(into)] = bytes(content)

    def genuine(self, of: ObjectId, marker: bytes, split: Callable[[int], Iterable[bytes]]) -> bytes | None:
        """Return the payload of an object if this cipher encrypted its marker and all its pieces; else None.

        ``split`` gets the length of the payload, and returns the encrypted pieces.
        """
        header = self.contents.get((PiecePlace.of_header(of), marker))
        if header is None:
            return None
        total, payload = parse(header).total_bytes, b""
        for value in split(total):
            piece = self.contents.get((PiecePlace(of, total, len(payload)), value))
            if piece is None:
                return None
            payload += piece
        return payload if len(payload) == total else None
