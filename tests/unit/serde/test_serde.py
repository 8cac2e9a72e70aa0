import contextlib
import io
import re
from pathlib import Path

import hypothesis.strategies as st
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

import lmcache
from lmcache.config import GlobalConfig, LMCacheEngineConfig, LMCacheEngineMetadata
from lmcache.storage_backend.serde import ContainerError, CreateSerde
from lmcache.storage_backend.serde.container import DTYPES, PayloadKind, pack
from tests.harness.scope import examples

SERDES = ("torch", "safetensor", "fast", "cachegen")
LOSSLESS = ("torch", "safetensor", "fast")


def make_serde(name, dtype=torch.float16, fmt="vllm"):
    metadata = LMCacheEngineMetadata("m", 1, 0, fmt, dtype, (2, 2, 16, 2, 8))
    return CreateSerde(name, LMCacheEngineConfig.from_defaults(), metadata)


def same_bits(first, second):
    return (
        first.dtype == second.dtype
        and first.shape == second.shape
        and bool(
            (first.contiguous().reshape(-1).view(torch.uint8) == second.reshape(-1).view(torch.uint8)).all()
        )
    )


@st.composite
def tensors(draw):
    """Generate tensors of any dtype, shape, strides and bits, including NaNs and infinities."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 4), max_size=6))
    numel = int(torch.Size(shape).numel())
    size = numel * dtype.itemsize
    bits = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    tensor = (bits.view(dtype) if size else torch.empty(0, dtype=dtype)).reshape(shape)
    return tensor.permute(draw(st.permutations(range(len(shape)))))


@pytest.mark.parametrize("name", SERDES)
@given(tensor=tensors())
@settings(max_examples=examples(40))
def test_round_trip_is_exact(name, tensor):
    if name == "cachegen" and tensor.ndim == 5 and tensor.shape[1] == 2 and tensor.dtype in DTYPES[:3]:
        return  # lossy: test_serde_cachegen.py checks the error bound
    serializer, deserializer = make_serde(name, tensor.dtype)
    assert same_bits(tensor, deserializer.from_bytes(serializer.to_bytes(tensor)))


@pytest.mark.parametrize("name", SERDES)
@pytest.mark.parametrize("buffer", [bytes, bytearray, memoryview])
def test_caller_owns_returned_tensors(name, buffer):
    serializer, deserializer = make_serde(name)
    tensor = torch.randn(2, 2, 16, 2, 8).half()
    with torch.inference_mode():
        blob = serializer.to_bytes(tensor)
        first, second = (deserializer.from_bytes(buffer(blob)) for _ in range(2))
    assert not first.is_inference()
    before = second.clone()
    first.add_(1)  # an inference tensor or a read-only tensor would raise
    assert torch.equal(second, before)
    assert blob == serializer.to_bytes(tensor)


@pytest.mark.parametrize("name", SERDES)
def test_serializing_does_not_change_tensors_with_gradients(name):
    serializer, deserializer = make_serde(name, torch.float32)
    tensor = torch.randn(2, 2, 16, 2, 8, requires_grad=True)
    before = tensor.detach().clone()
    assert not deserializer.from_bytes(serializer.to_bytes(tensor)).requires_grad
    assert torch.equal(tensor, before)


@pytest.mark.parametrize("writer", SERDES)
@pytest.mark.parametrize("reader", SERDES)
def test_each_serde_reads_containers_of_all_serdes(writer, reader):
    tensor = torch.zeros(2, 2, 16, 2, 8).half()
    blob = make_serde(writer)[0].to_bytes(tensor)
    assert torch.equal(make_serde(reader)[1].from_bytes(blob), tensor)


def test_error_for_unknown_serde_lists_the_known_serdes():
    with pytest.raises(ValueError, match="write torch, safetensor, cachegen, fast"):
        make_serde("pickle")


@pytest.mark.parametrize("debug", [True, False])
def test_calls_are_timed_in_debug_mode(debug, monkeypatch):
    lines = []
    monkeypatch.setattr(GlobalConfig, "enable_debug", debug)
    monkeypatch.setattr("lmcache.storage_backend.serde.serde.logger.debug", lambda *line: lines.append(line))
    serializer, deserializer = make_serde("torch")
    deserializer.from_bytes(serializer.to_bytes(torch.zeros(1).half()))
    assert len(lines) == (2 if debug else 0)


@pytest.mark.parametrize("name", SERDES)
@pytest.mark.parametrize("stored", [torch.float32, torch.float64, torch.bfloat16])
def test_defect_05_cast_never_makes_a_value_infinite(name, stored):
    serializer, deserializer = make_serde(name)
    fitting = torch.full((3,), 60000.0, dtype=stored)
    assert torch.equal(deserializer.from_bytes(serializer.to_bytes(fitting)), fitting.half())
    with pytest.raises(ContainerError, match="too large"):
        deserializer.from_bytes(serializer.to_bytes(torch.tensor([1.0, 1e30], dtype=stored)))
    was_infinite = torch.tensor([float("inf"), float("nan")], dtype=stored)
    assert deserializer.from_bytes(serializer.to_bytes(was_infinite)).isfinite().tolist() == [False, False]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_defect_05_cast_to_8_bit_floats_does_not_clip(dtype):
    serializer, deserializer = make_serde("torch")[0], make_serde("torch", dtype)[1]
    largest = torch.finfo(dtype).max
    blob = serializer.to_bytes(torch.tensor([1.0, -largest]).half())
    assert deserializer.from_bytes(blob).float().tolist() == [1, -largest]
    with pytest.raises(ContainerError, match="too large"):
        deserializer.from_bytes(serializer.to_bytes(torch.tensor([1.0, -largest - 1024]).half()))


@pytest.mark.parametrize("value", [float("inf"), float("-inf")])
def test_defect_05_infinity_is_returned_unchanged_or_refused(value):
    """torch casts infinity to 448, the largest number of a dtype without infinity."""
    blob = make_serde("torch", torch.float16)[0].to_bytes(torch.tensor([1.0, value], dtype=torch.float16))
    assert make_serde("torch", torch.float8_e5m2)[1].from_bytes(blob).double().tolist() == [1.0, value]
    with pytest.raises(ContainerError, match="too large"):
        make_serde("torch", torch.float8_e4m3fn)[1].from_bytes(blob)


@pytest.mark.parametrize(("stored", "wanted"), [("int8", "float16"), ("float16", "int8"), ("int32", "int8")])
def test_defect_05_integers_are_not_cast(stored, wanted):
    blob = make_serde("torch")[0].to_bytes(torch.ones(3, dtype=getattr(torch, stored)))
    with pytest.raises(ContainerError, match="is not cast"):
        make_serde("torch", getattr(torch, wanted))[1].from_bytes(blob)


SAFE = safetensors.torch.save({"tensor_bytes": torch.arange(6.0).half()})


@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, [6]), (torch.float16, [2, 3])])
def test_safetensors_payload_must_match_its_container(dtype, shape):
    with pytest.raises(ContainerError, match="payload is"):
        make_serde("safetensor")[1].from_bytes(pack(PayloadKind.SAFETENSORS, dtype, shape, [SAFE]))


@given(data=st.data())
@settings(max_examples=examples(50))
def test_hostile_safetensors_payload_gives_a_container_error_or_a_tensor(data):
    mutated = bytearray(SAFE)
    for _ in range(data.draw(st.integers(1, 4))):
        mutated[data.draw(st.integers(0, len(SAFE) - 1))] = data.draw(st.integers(0, 255))
    truncated = SAFE[: data.draw(st.integers(0, len(SAFE) - 1))]
    for payload in (mutated, truncated, data.draw(st.binary(max_size=200))):
        blob = pack(PayloadKind.SAFETENSORS, torch.float16, [6], [payload])
        with contextlib.suppress(ContainerError):
            assert make_serde("safetensor")[1].from_bytes(blob).shape == (6,)


def torch_saved(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.getvalue()


@pytest.mark.parametrize("name", SERDES)
def test_refuses_what_lmcache_0_1_to_0_3_wrote(name):
    for blob in (torch_saved(torch.arange(6.0).half()), SAFE, bytes(64)):
        with pytest.raises(ContainerError, match="not a container"):
            make_serde(name)[1].from_bytes(blob)


@given(st.binary(max_size=300))
def test_refuses_bytes_without_a_container(blob):
    with pytest.raises(ContainerError):
        make_serde("fast")[1].from_bytes(blob)


def test_defect_20_no_module_imports_pickle():
    imports = re.compile(
        r"^\s*(import|from)\s+(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b", re.MULTILINE
    )
    loads = re.compile(r"(?<!safetensors\.)torch\.load\(")
    for path in Path(lmcache.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not imports.search(text), path
        assert not loads.search(text), path


@pytest.mark.parametrize("name", SERDES)
def test_labelled_value_is_readable_only_under_its_label(name):
    serializer, deserializer = make_serde(name)
    chunk = torch.ones(2, 2, 16, 2, 8).half()
    blob = serializer.to_bytes(chunk, b"label")
    assert torch.equal(
        deserializer.from_bytes(blob, b"label"), deserializer.from_bytes(serializer.to_bytes(chunk))
    )
    for label in (b"other", b"labe", b"label ", b""):
        with pytest.raises(ContainerError):
            deserializer.from_bytes(blob, label)
    with pytest.raises(ContainerError, match="version 1, not 2"):
        deserializer.from_bytes(serializer.to_bytes(chunk), b"label")
