"""Shared objects of CUDA keep only the machine code for one architecture."""

import struct
from collections.abc import Iterable

import pytest

from tools.gpu_bundle import engine, fatbin

REPLACEMENT = b"small image of 75"


def elf(**sections: bytes) -> bytes:
    """Return a 64-bit ELF file with these sections. ``__`` in a name stands for a dot."""
    contents = {name.replace("__", "."): content for name, content in sections.items()}
    return elf_of(contents)


def elf_of(contents: dict[str, bytes]) -> bytes:
    names, body, entries = b"\0", bytearray(64), []
    for name, content in contents.items():
        body += bytes(-len(body) % 8)
        entries.append((len(names), len(body), len(content)))
        names += name.encode() + b"\0"
        body += content
    entries.append((len(names), len(body), len(names) + len(b".shstrtab\0")))
    body += names + b".shstrtab\0"
    body += bytes(-len(body) % 8)
    struct.pack_into("<Q", body, 0x28, len(body))
    struct.pack_into("<HHH", body, 0x3A, 64, len(entries), len(entries) - 1)
    for name_at, offset, num_bytes in entries:
        body += struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, offset, num_bytes, 0, 0, 1, 0)
    body[:4] = b"\x7fELF"
    return bytes(body)


def image(architecture: int, code: bytes, kind: int = fatbin.MACHINE_CODE) -> bytes:
    """Return an image with a header of 64 bytes."""
    code += bytes(-len(code) % 8)
    header = struct.pack("<HHIQ", kind, 1, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
    return header.ljust(64, b"\0") + code


def container(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", fatbin.CONTAINER_MAGIC, 1, 16, len(body)) + body


def cubin(*kernels: str) -> bytes:
    return elf_of({f".text.{name}": b"machine code" for name in kernels})


def shared_object(*containers: bytes) -> bytes:
    """Return a shared object. 24 bytes of padding follow each container."""
    return elf(__text=b"host code", __nv_fatbin=b"".join(part + bytes(24) for part in containers))


def contents(content: bytes) -> list[list[tuple[int, bytes]]]:
    """Return architecture and code of the images in each container."""
    return [
        [(part.architecture, content[part.payload : part.end].rstrip(b"\0")) for part in block.images]
        for block in fatbin.containers(content)
    ]


def pruned(content: bytes, architecture: int = 90, needed: Iterable[str] | None = None) -> bytes:
    is_needed = (lambda _: True) if needed is None else set(needed).__contains__
    return fatbin.prune(content, architecture, image(75, REPLACEMENT), is_needed).content


def test_only_code_of_the_architecture_remains():
    first = container(
        image(80, b"a80"), image(90, b"a90"), image(90, b"ptx", kind=fatbin.PTX), image(100, b"a100")
    )
    second = container(image(90, b"b90"))
    before = shared_object(first, second)
    after = pruned(before)
    assert contents(after) == [[(90, b"a90")], [(90, b"b90")]]
    assert len(after) == len(before)
    assert [c.start for c in fatbin.containers(after)] == [c.start for c in fatbin.containers(before)]
    assert fatbin.sections(after) == fatbin.sections(before)


def test_removed_code_is_zeros_and_is_counted():
    after = fatbin.prune(shared_object(container(image(80, b"x" * 1000), image(90, b"y" * 8))), 90, b"")
    assert b"xx" not in after.content
    assert after.remaining_bytes == 64 + 8
    assert after.dropped_bytes == 64 + 1000


@pytest.mark.parametrize(
    ("architecture", "code"),
    [(90, b"for 90"), (89, b"for 86"), (86, b"for 86"), (87, b"for 86"), (80, b"for 80")],
)
def test_code_of_an_older_minor_version_runs_too(architecture, code):
    images = [image(n, f"for {n}".encode()) for n in (75, 80, 86, 90)]
    assert contents(pruned(shared_object(container(*images)), architecture))[0][0][1] == code


@pytest.mark.parametrize("architecture", [70, 100, 121])
def test_code_of_other_major_versions_is_replaced(architecture):
    after = pruned(shared_object(container(image(80, b"a" * 200), image(90, b"b" * 200))), architecture)
    assert contents(after) == [[(75, REPLACEMENT)]]


def test_a_container_that_is_too_small_for_the_replacement_becomes_empty():
    assert contents(pruned(shared_object(container(image(80, b"a"))))) == [[]]


def test_images_without_needed_kernels_are_replaced():
    before = shared_object(
        container(image(90, cubin("used", "other"))),
        container(image(90, cubin("other"))),
        container(image(90, b"compressed: its names can't be read")),
    )
    after = contents(pruned(before, needed=["used"]))
    assert [[architecture for architecture, _ in images] for images in after] == [[90], [75], [90]]


def test_smallest_image():
    before = shared_object(container(image(75, b"large" * 9), image(90, b"")), container(image(75, b"tiny")))
    assert fatbin.smallest_image(before, 75) == image(75, b"tiny")
    with pytest.raises(ValueError, match=r"no code for compute capability 8\.0"):
        fatbin.smallest_image(before, 80)


def test_a_file_without_gpu_code_is_refused():
    with pytest.raises(ValueError, match="no section"):
        fatbin.prune(elf(__text=b"host code"), 90, b"")


HOPPER = (
    "_ZN7cutlass13device_kernelIN5flash20enable_sm90_or_laterINS1_16FlashAttnFwdSm90INS1_25CollectiveMainloop"
)
"""Beginning of the names of FlashAttention 3's kernels in vLLM 0.33."""


@pytest.mark.parametrize(
    ("kernel", "is_needed"),
    [
        (f"{HOPPER}FwdSm90ILi2EIJNS7_ILi128EEESA_SA_EEELi128ENS_10bfloat16_tEfNS_4arch4Sm90E", True),
        (f"{HOPPER}FwdSm90ILi2EIJNS7_ILi192EEENS7_ILi128EEENS7_ILi64EEEEEELi64ENS_10bfloat16_tEf", True),
        (f"{HOPPER}FwdSm90ILi2EIJNS7_ILi128EEENS7_ILi96EEENS7_ILi192EEEEEELi128ENS_10bfloat16_tEf", False),
        (f"{HOPPER}FwdSm90ILi2EIJNS7_ILi128EEENS7_ILi96EEENS7_ILi256EEEEEELi256ENS_10bfloat16_tEf", False),
        (f"{HOPPER}FwdSm90ILi2EIJNS7_ILi128EEESA_SA_EEELi128ENS_6half_tEfNS_4arch4Sm90E", False),
        ("_ZN5flash32prepare_varlen_num_blocks_kernelILi32ELb0EEEviiiPKi", True),
        ("_ZN7cutlass13device_kernelIN5flash19FlashAttnFwdCombineIN4cute5tuple", True),
    ],
)
def test_kernels_of_flash_attention_3(kernel, is_needed):
    assert engine.is_needed_by_flash_attention_3(kernel) == is_needed


@pytest.mark.parametrize(
    ("architecture", "used", "unused"),
    [
        (90, engine.FLASH_ATTENTION_3, engine.FLASH_ATTENTION_2),
        (80, engine.FLASH_ATTENTION_2, engine.FLASH_ATTENTION_3),
    ],
)
def test_engine_is_cut(tmp_path, architecture, used, unused):
    extension = shared_object(container(image(75, b"x"), image(80, b"y" * 99), image(90, b"z" * 99)))
    files = [
        "vllm/third_party/deep_gemm/a.py",
        "vllm/_flashmla_C.abi3.so",
        "vllm/csrc/deep/a.cu",
        "vllm/llm.py",
    ]
    extensions = ["vllm/_C_stable_libtorch.abi3.so", "vllm/_moe_C_stable_libtorch.abi3.so", used, unused]
    for name in files + extensions:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(extension)
    cached = tmp_path / "cached"
    cached.hardlink_to(tmp_path / used)
    lines: list[str] = []
    engine.cut(tmp_path, architecture, lines.append)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"cached", "vllm/llm.py", *extensions} - {unused}
    assert cached.read_bytes() == extension
    assert [[a for a, _ in images] for images in contents((tmp_path / used).read_bytes())] == [[architecture]]
    assert len(lines) == 3
