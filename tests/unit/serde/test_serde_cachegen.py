import contextlib
import math
import zlib

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from lmcache.config import LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde.cachegen_basics import CacheGenEncoderOutput
from lmcache.storage_backend.serde.container import HEADER_BYTES, ContainerError, PayloadKind, pack, parse
from lmcache.storage_backend.serde.formats import CacheGenSerializer, ContainerDeserializer
from tests.harness.scope import examples

CODED = (torch.float16, torch.bfloat16, torch.float32)


def make_serde(fmt="vllm", dtype=torch.float16, bins=32):
    config, metadata = (
        LMCacheEngineConfig.from_defaults(),
        LMCacheEngineMetadata("m", 1, 0, fmt, dtype, (2, 2, 256, 2, 8)),
    )
    return CacheGenSerializer(config, metadata, bins), ContainerDeserializer(dtype)


def in_layout(kv, fmt):
    return kv if fmt == "vllm" else kv.transpose(2, 3)


def error_bound(kv, bins):
    """Return the error bound of each element of KV [L, 2, T, H, D], as docs/reference/serde.md states it."""
    largest = kv.double().abs().amax((3, 4), keepdim=True)
    half_step = torch.clamp(largest / (bins - 2), min=2**-127) * (1 + 2**-20)
    info = torch.finfo(kv.dtype)
    return half_step + (kv.double().abs() + half_step) * info.eps / 2 + info.smallest_normal * info.eps / 2


@st.composite
def any_bits(draw):
    """Generate KV [L, 2, T, H, D] of any finite bits, including zeros, denormals and the largest numbers."""
    dtype = draw(st.sampled_from(CODED))
    shape = (draw(st.integers(1, 2)), 2, *(draw(st.integers(1, 4)) for _ in range(3)))
    size = math.prod(shape) * dtype.itemsize
    bits = torch.from_numpy(np.frombuffer(draw(st.binary(min_size=size, max_size=size)), np.uint8).copy())
    kv = bits.view(dtype).reshape(shape)
    return torch.where(kv.isfinite(), kv, torch.finfo(dtype).max)


@given(any_bits(), st.sampled_from(["vllm", "huggingface"]), st.sampled_from([4, 8, 16, 32, 64, 128, 256]))
@settings(max_examples=examples(100))
def test_each_element_is_within_the_documented_error(kv, fmt, bins):
    serializer, deserializer = make_serde(fmt, kv.dtype, bins)
    decoded = deserializer.from_bytes(serializer.to_bytes(in_layout(kv, fmt)))
    assert serializer.num_raw == 0
    assert decoded.dtype == kv.dtype
    error = (in_layout(decoded, fmt).double() - kv.double()).abs()
    assert bool((error <= error_bound(kv, bins)).all())


@pytest.mark.parametrize("bins", [4, 8, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("extreme", ["max", "tiny", "few bits", "single bit"])
def test_extreme_numbers_are_within_the_documented_error(extreme, dtype, bins):
    info = torch.finfo(dtype)
    smallest = info.tiny * info.eps
    largest = {"max": info.max, "tiny": info.tiny, "few bits": 22 * smallest, "single bit": smallest}[extreme]
    kv = (torch.linspace(-1, 1, 64).double() * largest).reshape(1, 2, 4, 2, 4).to(dtype)
    serializer, deserializer = make_serde("vllm", dtype, bins)
    decoded = deserializer.from_bytes(serializer.to_bytes(kv))
    assert serializer.num_raw == 0
    assert bool(((decoded.double() - kv.double()).abs() <= error_bound(kv, bins)).all())


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("fmt", ["vllm", "huggingface"])
@pytest.mark.parametrize("num_tokens", [1, 2, 17, 256, 300])
def test_chunks_of_any_length_are_within_the_documented_error(dtype, fmt, num_tokens):
    kv = (torch.randn(3, 2, num_tokens, 2, 16) * torch.randn(2, 16).exp() + torch.randn(2, 16)).to(dtype)
    serializer, deserializer = make_serde(fmt, dtype)
    blob = serializer.to_bytes(in_layout(kv, fmt))
    decoded = in_layout(deserializer.from_bytes(blob), fmt)
    assert bool(((decoded.double() - kv.double()).abs() <= error_bound(kv, 32)).all())
    encoded = CacheGenEncoderOutput.from_bytes(blob)
    assert (encoded.num_heads, encoded.head_size) == (2, 16)


def test_compresses_random_kv_by_three():
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(4, 2, 256, 4, 64, generator=generator).half()
    assert len(make_serde()[0].to_bytes(kv)) * 3 < kv.nbytes


def test_zeros_stay_zeros():
    serializer, deserializer = make_serde()
    assert not deserializer.from_bytes(serializer.to_bytes(torch.zeros(2, 2, 5, 2, 8).half())).any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("layer", [0, 1])
def test_non_finite_values_are_stored_raw_and_counted(value, layer):
    serializer, deserializer = make_serde()
    kv = torch.randn(2, 2, 5, 2, 8).half()
    kv[layer, 1, 4, 1, 7] = value
    blob = serializer.to_bytes(kv)
    assert serializer.num_raw == 1
    assert parse(blob).kind is PayloadKind.RAW
    assert deserializer.from_bytes(blob).numpy().tobytes() == kv.numpy().tobytes()


@pytest.mark.parametrize("shape", [(2, 2, 0, 2, 8), (0, 2, 5, 2, 8), (2, 2, 5, 16), (2, 1, 5, 2, 8), ()])
def test_tensors_of_other_shapes_are_stored_raw_and_counted(shape):
    serializer, deserializer = make_serde()
    kv = torch.ones(shape).half()
    assert torch.equal(deserializer.from_bytes(serializer.to_bytes(kv)), kv)
    assert serializer.num_raw == 1


def test_refuses_invalid_formats_and_bins():
    with pytest.raises(ValueError, match="Invalid format: sglang"):
        make_serde("sglang")
    for bins in (2, 24, 512):
        with pytest.raises(ValueError, match=f"not {bins}"):
            make_serde(bins=bins)


# Hostile payloads: the checksum of the container is right, but its content is not.

SHAPE = (2, 2, 5, 2, 8)
VALID_PAYLOAD = bytes(
    parse(
        make_serde()[0].to_bytes(torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).half())
    ).payload
)
FIELDS_BYTES, SCALES_BYTES = 4 + 4 * SHAPE[0], 4 * SHAPE[0] * SHAPE[1] * SHAPE[2]


def read(payload, shape=SHAPE, dtype=torch.float16, kind=PayloadKind.CACHEGEN):
    return make_serde()[1].from_bytes(pack(kind, dtype, shape, [payload]))


@given(st.data())
@settings(max_examples=examples(150))
def test_hostile_payloads_give_a_container_error_or_a_tensor_of_the_shape(data):
    payload = bytearray(VALID_PAYLOAD)
    for _ in range(data.draw(st.integers(0, 4))):
        position = data.draw(st.integers(0, FIELDS_BYTES - 1) | st.integers(0, len(VALID_PAYLOAD) - 1))
        payload[position] = data.draw(st.integers(0, 255))
    shape = data.draw(st.just(SHAPE) | st.lists(st.sampled_from([0, 1, 2, 5, 8, 2**31]), max_size=8))
    truncated = payload[: data.draw(st.integers(0, len(payload)))]
    for candidate in (payload, truncated, data.draw(st.binary(max_size=100))):
        with contextlib.suppress(ContainerError):
            tensor = read(candidate, shape)
            assert tensor.shape == torch.Size(shape)
            assert tensor.numel() <= 8 * len(candidate)


def with_streams(streams, shape):
    lengths = np.array([len(stream) for stream in streams], "<u4").tobytes()
    scales = bytes(4 * shape[0] * 2 * shape[2])
    return b"".join([b"\x02\x0f\0\0", lengths, scales, *streams])


def deflated(raw):
    coder = zlib.compressobj(9, zlib.DEFLATED, -15)
    return coder.compress(raw) + coder.flush()


def test_stream_cannot_expand_beyond_the_limit_of_huffman_codes():
    shape = (1, 2, 63, 4, 512)  # 64 symbols per channel
    bomb = deflated(bytes(2 * 64 * 4 * 512))
    assert len(bomb) < 2000
    with pytest.raises(ContainerError, match="streams don't fit"):
        read(with_streams([bomb], shape), shape)


def test_refuses_streams_of_another_length():
    shape = (1, 2, 2, 2, 8)  # 3 symbols per channel, 96 in total
    stream = deflated(bytes(range(96)))
    assert read(with_streams([stream], shape), shape).shape == shape
    other_streams = [deflated(bytes(num_symbols)) for num_symbols in (0, 95, 97, 10**7)]
    for damaged in (stream + b"\0", *(other.ljust(12, b"\0") for other in other_streams)):
        with pytest.raises(ContainerError, match="does not have exactly 96"):
            read(with_streams([damaged], shape), shape)


@pytest.mark.parametrize(
    ("position", "value", "reason"),
    [
        (0, 1, "axis"),
        (1, 0, "largest"),
        (1, 16, "largest"),
        (4, 255, "don't fit"),
        (FIELDS_BYTES + SCALES_BYTES, 7, "stream"),
    ],
)
def test_checks_each_field(position, value, reason):
    payload = bytearray(VALID_PAYLOAD)
    payload[position] = value
    with pytest.raises(ContainerError, match=reason):
        read(payload)


def test_refuses_other_kinds_as_cachegen():
    with pytest.raises(ContainerError, match="RAW"):
        CacheGenEncoderOutput.from_bytes(pack(PayloadKind.RAW, torch.int8, [0], [b""]))
    with pytest.raises(ContainerError, match="int8"):
        read(VALID_PAYLOAD, dtype=torch.int8)


def test_container_holds_the_documented_fields():
    blob = make_serde()[0].to_bytes(torch.ones(1, 2, 3, 1, 2).half())
    length = int.from_bytes(blob[HEADER_BYTES + 4 : HEADER_BYTES + 8], "little")
    stream = blob[HEADER_BYTES + 8 + 24 :]
    assert blob[HEADER_BYTES : HEADER_BYTES + 4] == bytes([2, 15, 0, 0])
    assert len(stream) == length
    assert (
        zlib.decompress(stream, -15) == bytes([30, 16, 16, 16]) * 4
    )  # the middle, and 3 times the same value
