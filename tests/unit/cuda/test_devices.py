"""Devices as different versions of the binding show them."""

import uuid
from types import SimpleNamespace

import pytest

from lmcache_client.cuda.driver import Device

GPU, SLICE = uuid.UUID(int=1), uuid.UUID(int=2)


@pytest.mark.parametrize("has_second_form", [True, False], ids=["cuda-bindings 12", "cuda-bindings 13"])
def test_mig_slice_has_the_uuid_of_the_slice(has_second_form: bool) -> None:
    """Version 12 has two forms of the call, and the first one returns the UUID of the whole GPU."""
    answers = {
        "cuDeviceGet": 0,
        "cuDeviceGetName": b"NVIDIA H100 MIG 1g.10gb\0",
        "cuDeviceGetUuid": SimpleNamespace(bytes=(GPU if has_second_form else SLICE).bytes),
        "cuDeviceGetUuid_v2": SimpleNamespace(bytes=SLICE.bytes),
    }
    names = {"cuDeviceGetUuid", *(("cuDeviceGetUuid_v2",) if has_second_form else ())}
    driver = SimpleNamespace(
        bindings=SimpleNamespace(**dict.fromkeys(names)), call=lambda name, *arguments: answers[name]
    )
    assert Device._from_ordinal(driver, 0).uuid == f"MIG-{SLICE}"
