"""Changes of a valid value, as an attacker makes them who can write to a medium but has no key."""

from collections.abc import Sequence

from tests.fuzz.bytes_input import BytesInput


def edited(source: BytesInput, original: bytes, foreign: Sequence[bytes]) -> bytes:
    """Return ``original`` with the changes that the rest of an input describes.

    A change replaces a byte, cuts the end off, copies bytes of one of ``foreign`` to the same or to another
    position, or inserts bytes. Each one begins with its kind (one byte) and its position (two bytes).
    """
    content = bytearray(original)
    while source.has_more:
        kind, position = source.number() % 5, source.number(2) % (len(content) + 1)
        if kind == 0:
            content[position : position + 1] = source.take(1)
        elif kind == 1:
            del content[position:]
        elif kind == 2:
            other, end = source.choice(foreign), position + source.number(2)
            content[position:end] = other[position:end]
        elif kind == 4:
            other, begin, length = source.choice(foreign), source.number(2), source.number(2)
            content[position : position + length] = other[begin : begin + length]
        else:
            content[position:position] = source.sized()
    return bytes(content)
