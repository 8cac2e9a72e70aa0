"""The chunk size is a multiple of the engine's block size. A size that differs from the setting is logged."""

import pytest

from lmcache_client.vllm.attach import whole_chunk_tokens


@pytest.mark.parametrize(
    ("wanted", "blocks", "expected"),
    [(256, 384, 384), (640, 384, 768), (1, 16, 16), (256, 16, 256), (640, 640, 640), (256, 256, 256)],
)
def test_chunk_size_is_rounded_up_and_a_change_is_logged(caplog, wanted, blocks, expected):
    assert whole_chunk_tokens(wanted, blocks) == expected
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (wanted != expected)
    for part in (f" {wanted} ", f" {blocks} ", f"shorter than {expected} tokens are not cached"):
        assert all(part in message for message in messages)
