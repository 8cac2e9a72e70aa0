"""The size of a chunk follows the engine's blocks, and a size that the user did not set is logged."""

from __future__ import annotations

import pytest

from lmcache.engines.vllm.attach import whole_chunk_tokens


@pytest.mark.parametrize(("wanted", "blocks", "expected"), [(256, 384, 384), (640, 384, 768), (1, 16, 16)])
def test_logs_a_chunk_that_is_larger_than_the_setting(caplog, wanted, blocks, expected):
    assert whole_chunk_tokens(wanted, blocks) == expected
    (record,) = caplog.records
    for number in (wanted, blocks, expected):
        assert f" {number} " in record.getMessage()
    assert f"shorter than {expected} tokens are not cached" in record.getMessage()


@pytest.mark.parametrize(("wanted", "blocks"), [(256, 16), (640, 640), (256, 256)])
def test_logs_nothing_when_the_setting_holds(caplog, wanted, blocks):
    assert whole_chunk_tokens(wanted, blocks) == wanted
    assert not caplog.records
