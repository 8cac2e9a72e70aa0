"""Keep only the machine code for one GPU architecture in a shared object of CUDA.

The section ``.nv_fatbin`` holds containers. A container has a header and images: machine code for one
architecture each, or PTX. The host code has the address of each container, so a container keeps its address
and its header. The needed images move to its front, and zeros replace the rest. Compression removes zeros.

A container without a needed image gets a small image of another architecture. Its kernels then fail with "no
kernel image is available", as they do on a GPU for which they were not built.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

CONTAINER_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of all images
_IMAGE = struct.Struct("<HHIQ")  # kind, version, bytes of this header, bytes of the image
_ARCHITECTURE_OFFSET = 28
PTX, MACHINE_CODE = 1, 2
_SECTION = struct.Struct("<IIQQQQIIQQ")


class Section(NamedTuple):
    """Place of a section in an ELF file, in bytes."""

    offset: int
    num_bytes: int


class Image(NamedTuple):
    """Code for one architecture."""

    kind: int
    architecture: int
    """90 for compute capability 9.0."""
    start: int
    payload: int
    """Offset of the code, after the header."""
    end: int


class Container(NamedTuple):
    """A header and its images."""

    start: int
    body: int
    """Offset of the first image."""
    end: int
    images: Sequence[Image]


class Pruned(NamedTuple):
    """A shared object with less code. Its length is unchanged."""

    content: bytes
    remaining_bytes: int
    dropped_bytes: int


def sections(elf: bytes, start: int = 0) -> dict[str, Section]:
    """Return the sections of the 64-bit ELF file that begins at ``start``, by name."""
    (table,) = struct.unpack_from("<Q", elf, start + 0x28)
    entry_bytes, count, names_index = struct.unpack_from("<HHH", elf, start + 0x3A)
    entries = [_SECTION.unpack_from(elf, start + table + n * entry_bytes) for n in range(count)]
    names = start + entries[names_index][4]
    places = {}
    for entry in entries:
        name = elf[names + entry[0] : elf.index(b"\0", names + entry[0])].decode()
        places[name] = Section(start + entry[4], entry[5])
    return places


def containers(elf: bytes) -> Iterator[Container]:
    """Yield the containers of a shared object. Raises ValueError if it holds no GPU code."""
    try:
        section = sections(elf)[".nv_fatbin"]
    except KeyError:
        raise ValueError("the file has no section .nv_fatbin") from None
    position, end = section.offset, section.offset + section.num_bytes
    while position + _CONTAINER.size <= end:
        magic, _, header_bytes, num_bytes = _CONTAINER.unpack_from(elf, position)
        if magic != CONTAINER_MAGIC:  # padding: containers begin at multiples of 8
            position += 8
            continue
        body = position + header_bytes
        yield Container(position, body, body + num_bytes, list(_images(elf, body, body + num_bytes)))
        position = body + num_bytes


def _images(elf: bytes, position: int, end: int) -> Iterator[Image]:
    while position < end:
        kind, _, header_bytes, num_bytes = _IMAGE.unpack_from(elf, position)
        (architecture,) = struct.unpack_from("<I", elf, position + _ARCHITECTURE_OFFSET)
        payload = position + header_bytes
        yield Image(kind, architecture, position, payload, payload + num_bytes)
        position = payload + num_bytes


def kernels(elf: bytes, image: Image) -> list[str]:
    """Return the mangled names of an image's kernels. The list is empty if the image is compressed."""
    if elf[image.payload : image.payload + 4] != b"\x7fELF":
        return []
    return [name.removeprefix(".text.") for name in sections(elf, image.payload) if name.startswith(".text.")]


def prune(
    elf: bytes,
    architecture: int,
    replacement: bytes,
    is_needed: Callable[[str], bool] = lambda _kernel: True,
) -> Pruned:
    """Keep the images that run on an architecture and have a needed kernel.

    Args:
        elf: The shared object.
        architecture: 90 for compute capability 9.0.
        replacement: A small image for containers that keep none (``smallest_image``).
        is_needed: Decides by the mangled name of a kernel. Images without readable names are kept.
    """
    content, remaining_bytes, dropped_bytes = bytearray(elf), 0, 0
    for container in containers(elf):
        images = [image for image in _fitting(container.images, architecture) if _has(elf, image, is_needed)]
        body = b"".join(elf[image.start : image.end] for image in images)
        length = container.end - container.body
        if not body and len(replacement) <= length:
            body = replacement
        content[container.body : container.end] = body.ljust(length, b"\0")
        struct.pack_into("<Q", content, container.start + 8, len(body))
        remaining_bytes += len(body)
        dropped_bytes += length - len(body)
    return Pruned(bytes(content), remaining_bytes, dropped_bytes)


def smallest_image(elf: bytes, architecture: int) -> bytes:
    """Return the smallest image for an architecture, with its header. Raises ValueError if there is none."""
    images = [i for c in containers(elf) for i in c.images if _is_code_for(i, architecture)]
    if not images:
        raise ValueError(f"the file has no code for compute capability {architecture / 10}")
    smallest = min(images, key=lambda image: image.end - image.start)
    return elf[smallest.start : smallest.end]


def _is_code_for(image: Image, architecture: int) -> bool:
    return image.kind == MACHINE_CODE and image.architecture == architecture


def _fitting(images: Sequence[Image], architecture: int) -> list[Image]:
    """Return the images for an architecture, or else the newest image of an older minor version."""
    exact = [image for image in images if _is_code_for(image, architecture)]
    older = [
        image
        for image in images
        if image.kind == MACHINE_CODE
        and image.architecture // 10 == architecture // 10
        and image.architecture < architecture
    ]
    return exact or sorted(older, key=lambda image: image.architecture)[-1:]


def _has(elf: bytes, image: Image, is_needed: Callable[[str], bool]) -> bool:
    names = kernels(elf, image)
    return not names or any(map(is_needed, names))
