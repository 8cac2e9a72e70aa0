"""Keys and ciphers for tests of encrypted tiers."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from lmcache_store.tiers.encryption.aes import AesGcm
from lmcache_store.tiers.encryption.keys import EncryptionKeys


def key_of(version: int) -> bytes:
    return bytes([version]) * 32


def keys(*versions: int) -> EncryptionKeys:
    return EncryptionKeys({version: key_of(version) for version in versions}, max(versions))


def cipher(domain: str, *versions: int) -> AesGcm:
    """A cipher with these key versions; the same version has the same key in all ciphers."""
    return AesGcm(domain, keys(*versions))


def write_keys(directory: Path, *versions: int) -> None:
    """Replace the keys in a directory by these versions."""
    directory.mkdir(exist_ok=True)
    for version in versions:
        (directory / str(version)).write_text(key_of(version).hex() + "\n")
    for file in directory.iterdir():
        if file.name not in map(str, versions):
            file.unlink()


def flipped(content: bytes, bits: Iterable[int] | None = None) -> Iterator[bytearray]:
    """The content with each bit flipped in turn, or with each of ``bits``."""
    for bit in range(8 * len(content)) if bits is None else bits:
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        yield damaged
