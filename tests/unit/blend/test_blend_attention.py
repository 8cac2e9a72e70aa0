import pytest
import torch

from lmcache_client.blend import attention
from lmcache_client.blend.attention import largest_weights

NUM_TOKENS, NUM_OBSERVED, NUM_KV_HEADS, HEAD_SIZE, SCALE = 50, 7, 3, 8, 0.4


def question(num_heads: int = 6, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q of the last tokens, K of all tokens, and which of them each of the last tokens sees."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(NUM_OBSERVED, num_heads, HEAD_SIZE, generator=generator).to(dtype) * 3
    k = torch.randn(NUM_TOKENS, NUM_KV_HEADS, HEAD_SIZE, generator=generator).to(dtype)
    observed = torch.arange(NUM_TOKENS)[-NUM_OBSERVED:]
    return q, k, torch.arange(NUM_TOKENS) <= observed[:, None]


def weights_slowly(q: torch.Tensor, k: torch.Tensor, is_visible: torch.Tensor) -> torch.Tensor:
    """Weights in the simple way, one head and one observed token at a time, in float64."""
    largest = torch.zeros(len(k), dtype=torch.float64)
    for head in range(q.shape[1]):
        keys = k[:, head * k.shape[1] // q.shape[1]].double()
        for query, visible in zip(q[:, head].double(), is_visible, strict=True):
            weights = torch.zeros_like(largest)
            weights[visible] = (keys[visible] @ query * SCALE).softmax(0)
            largest = largest.maximum(weights)
    return largest


@pytest.mark.parametrize("num_heads", [3, 6, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_weights_match_the_simple_arithmetic(num_heads, dtype):
    prompt = question(num_heads, dtype)
    weights = largest_weights(*prompt, SCALE)
    assert weights.dtype == torch.float32
    assert (weights - weights_slowly(*prompt)).abs().max() < 1e-6


@pytest.mark.parametrize("rows", [1, 3, 4 * NUM_OBSERVED, 9 * NUM_OBSERVED])
def test_parts_of_heads_and_rows_change_nothing(rows, monkeypatch):
    prompt = question(12)
    together = largest_weights(*prompt, SCALE)
    monkeypatch.setattr(attention, "_MAX_SCORES_BYTES", rows * 4 * NUM_TOKENS)
    assert torch.allclose(largest_weights(*prompt, SCALE), together, rtol=1e-6, atol=0)


def test_memory_is_bounded(monkeypatch):
    """All scores of this question together would take 16 times the bound."""
    sizes, softmax = [], torch.Tensor.softmax

    def note_size(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.nbytes)
        return softmax(scores, dim)

    monkeypatch.setattr(torch.Tensor, "softmax", note_size)
    monkeypatch.setattr(attention, "_MAX_SCORES_BYTES", 1 << 20)
    q, k = torch.randn(64, 16, HEAD_SIZE), torch.randn(1 << 12, 4, HEAD_SIZE)
    largest_weights(q, k, torch.ones(len(q), len(k), dtype=torch.bool), SCALE)
    assert sizes == [1 << 20] * 16


def test_products_beyond_half_precision_have_weights():
    q, k, is_visible = question(dtype=torch.float16)
    weights = largest_weights(q * 300, k * 300, is_visible, SCALE)
    assert not weights.isnan().any()
    assert (weights - weights_slowly(q * 300, k * 300, is_visible)).abs().max() < 1e-6


def test_hidden_tokens_have_no_weight_and_may_be_undefined():
    q, k, is_visible = question()
    is_visible[:, 5:20] = False
    expected = largest_weights(q, k, is_visible, SCALE)
    k[5:20] = torch.nan
    assert torch.equal(largest_weights(q, k, is_visible, SCALE), expected)
    assert expected[5:20].tolist() == [0] * 15


def test_a_nan_that_is_visible_shows():
    q, k, is_visible = question()
    k[9, 0, 0] = torch.nan
    assert largest_weights(q, k, is_visible, SCALE).isnan().all()


def test_nothing_observed_gives_no_weight():
    q, k, is_visible = question()
    assert largest_weights(q[:0], k, is_visible[:0], SCALE).tolist() == [0] * NUM_TOKENS
    assert largest_weights(q, k[:0], is_visible[:, :0], SCALE).tolist() == []
