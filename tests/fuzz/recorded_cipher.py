"""A cipher that remembers what it encrypted, so that a fuzz target knows which bytes are genuine."""

from lmcache.tiers.encryption.aes import AesGcm
from lmcache.tiers.encryption.pieces import Place
from lmcache.tiers.header import Buffer


class RecordedCipher(AesGcm):
    """The cipher of a tier, with the content of each piece by its place and its encrypted bytes."""

    def __init__(self, domain: str) -> None:
        super().__init__(domain)
        self.contents: dict[tuple[Place, bytes], bytes] = {}

    def encrypt(self, place: Place, content: Buffer, into: memoryview) -> None:
        """See Cipher."""
        super().encrypt(place, content, into)
        self.contents[place, bytes(into)] = bytes(content)
