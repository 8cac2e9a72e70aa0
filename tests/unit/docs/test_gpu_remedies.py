"""The page on troubleshooting explains every error of CUDA that has a remedy."""

from pathlib import Path

import pytest

from lmcache_client.cuda.errors import REMEDIES, CudaError

PAGE = Path(__file__).resolve().parents[3] / "docs" / "operations" / "troubleshooting.md"


@pytest.mark.parametrize(("function", "code"), REMEDIES, ids=str)
def test_page_has_a_row_for_each_remedy(function: str, code: int) -> None:
    assert f"`{function} … ({code})`" in PAGE.read_text()


def test_error_ends_with_its_remedy() -> None:
    for (function, code), remedy in REMEDIES.items():
        assert (
            str(CudaError(function, code, "CUDA_ERROR_X")) == f"{function}: CUDA_ERROR_X ({code}): {remedy}"
        )
    assert str(CudaError("cuInit", 3, "CUDA_ERROR_X")) == "cuInit: CUDA_ERROR_X (3)"
