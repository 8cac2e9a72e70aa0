"""What the images install is what the tests run with."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHARED = ("numpy", "xxhash", "grpcio", "protobuf")
"""The storage core's, which the operator does without."""


def pins(*names: str) -> dict[str, str]:
    text = "\n".join((ROOT / name).read_text() for name in names)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


@pytest.mark.parametrize("image", ["operator", "sidecar"])
def test_every_version_is_one_that_is_tested(image):
    tested = pins("tools/requirements/dev.txt", "tools/requirements/torch.txt")
    installed = pins(f"{image}/requirements.txt")
    assert installed
    assert {name: tested.get(name) for name in installed} == installed


def test_the_operator_installs_nothing_of_the_data_path():
    assert not set(pins("operator/requirements.txt")) & set(SHARED)
    assert set(pins("sidecar/requirements.txt")) >= set(SHARED)
