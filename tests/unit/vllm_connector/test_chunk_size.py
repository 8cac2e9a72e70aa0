"""The chunk size is a multiple of the engine's block size. A size that differs from the setting is logged."""

import pytest

from lmcache.engines.vllm.attach import whole_chunk_tokens


@pytest.mark.parametrize(("wanted", "blocks", "expected"), [(256, 384, 384), (640, 384, 768), (1, 16, 16)])
def test_chunk_size_is_rounded_up_and_logged(caplog, wanted, blocks, expected):
    assert whole_chunk_tokens(wanted, blocks) == expected
    (record,) = caplog.records
    for number in (wanted, blocks, expected):
        assert f" {number} " in record.getMessage()
    assert f"shorter than {expected} tokens are not cached" in record.getMessage()


@pytest.mark.parametrize(("wanted", "blocks"), [(256, 16), (640, 640), (256, 256)])
def test_valid_chunk_size_is_retained_without_log(caplog, wanted, blocks):
    assert whole_chunk_tokens(wanted, blocks) == wanted
    assert not caplog.records
