import contextlib

import hypothesis.strategies as st
import pytest
import torch
import xxhash
from hypothesis import given

from lmcache.storage_backend.serde.container import (
    DTYPES,
    HEADER_BYTES,
    ContainerError,
    PayloadKind,
    pack,
    parse,
    tensor_bytes,
    tensor_from_bytes,
)

FIELDS_BYTES = 56

kinds = st.sampled_from(list(PayloadKind))
dtypes = st.sampled_from(DTYPES)
shapes = st.lists(st.integers(0, 100), max_size=8)


def seal(fields, payload=b""):
    """Return a container with any fields and a matching checksum."""
    check = xxhash.xxh3_128(fields + xxhash.xxh3_128(payload).digest()).digest()
    return fields + check + b"LMCserde" + payload


def test_packs_golden_bytes():
    tensor = torch.arange(6, dtype=torch.int8).reshape(2, 3)
    blob = pack(PayloadKind.RAW, tensor.dtype, tensor.shape, [tensor_bytes(tensor)])
    assert blob.hex() == (
        "4c4d437365726465"  # LMCserde
        "0100" "01" "06" "02" "000000"  # version 1, raw, int8, 2 dimensions
        "0600000000000000"  # payload bytes
        "0200000003000000" "000000000000000000000000000000000000000000000000"  # 2 x 3
        "5885d5ace03be97d130b487dc21794c1"  # checksum
        "4c4d437365726465"
        "000102030405"
    )  # fmt: skip


def test_codes_of_dtypes_and_kinds_never_change():
    assert [str(dtype).removeprefix("torch.") for dtype in DTYPES] == [
        "float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2",
        "int8", "uint8", "int16", "int32", "int64", "float8_e4m3fnuz", "float8_e5m2fnuz",
    ]  # fmt: skip
    assert [(kind.name, kind.value) for kind in PayloadKind] == [
        ("RAW", 1),
        ("SAFETENSORS", 2),
        ("CACHEGEN", 3),
    ]


@given(kinds, dtypes, shapes, st.lists(st.binary(max_size=50), max_size=3))
def test_parses_the_packed_container(kind, dtype, shape, parts):
    blob = pack(kind, dtype, shape, parts)
    assert parse(blob) == (kind, dtype, tuple(shape), b"".join(parts))


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_refuses_arbitrary_bytes(blob):
    with pytest.raises(ContainerError):
        parse(blob)


@given(kinds, dtypes, shapes, st.binary(max_size=20), st.data())
def test_defect_04_refuses_flipped_bits(kind, dtype, shape, payload, data):
    blob = bytearray(pack(kind, dtype, shape, [payload]))
    bit = data.draw(st.integers(0, len(blob) * 8 - 1))
    blob[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ContainerError):
        parse(blob)


@given(st.binary(max_size=20), st.data())
def test_refuses_truncated_and_extended_containers(payload, data):
    blob = pack(PayloadKind.RAW, torch.uint8, [len(payload)], [payload])
    truncated = blob[: data.draw(st.integers(0, len(blob) - 1))]
    for damaged in (truncated, blob + b"\0"):
        with pytest.raises(ContainerError, match="payload has" if len(damaged) >= HEADER_BYTES else None):
            parse(damaged)


@given(st.data())
def test_changed_fields_with_right_checksum_are_refused_or_parsed_exactly(data):
    fields = bytearray(pack(PayloadKind.RAW, torch.float16, [2, 3], [bytes(12)])[:FIELDS_BYTES])
    for _ in range(data.draw(st.integers(1, 3))):
        fields[data.draw(st.integers(8, FIELDS_BYTES - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ContainerError):
        kind, dtype, shape, payload = parse(seal(bytes(fields), bytes(12)))
        assert pack(kind, dtype, shape, [payload]) == seal(bytes(fields), bytes(12))
        assert tensor_from_bytes(payload, dtype, shape).nbytes == 12


@pytest.mark.parametrize(
    "shape",
    [(2**32 - 1,) * 8, (0, 2**32 - 1, 2**32 - 1), (2**32 - 1, 0, 2**31)],
    ids=["huge", "empty with huge dimensions", "empty middle dimension"],
)
def test_checks_declared_sizes(shape):
    fields = bytearray(pack(PayloadKind.RAW, torch.int64, [0] * len(shape), [b""])[:FIELDS_BYTES])
    for axis, size in enumerate(shape):
        fields[24 + 4 * axis : 28 + 4 * axis] = size.to_bytes(4, "little")
    with pytest.raises(ContainerError, match=r"shape|bytes are no"):
        tensor_from_bytes(b"", *parse(seal(bytes(fields)))[1:3])


def test_error_names_unsupported_version():
    fields = bytearray(pack(PayloadKind.RAW, torch.int8, [0], [b""])[:FIELDS_BYTES])
    fields[8] = 2
    with pytest.raises(ContainerError, match="version 2"):
        parse(seal(bytes(fields)))


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [(torch.bool, [1]), (torch.complex64, [1]), (torch.int8, [1] * 9), (torch.int8, [1 << 32])],
)
def test_refuses_to_pack_unsupported_tensors(dtype, shape):
    with pytest.raises(ValueError, match="can't be stored"):
        pack(PayloadKind.RAW, dtype, shape, [b""])
