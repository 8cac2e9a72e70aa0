from itertools import pairwise, permutations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given

from lmcache.blend.executor import CacheBlendImpl
from lmcache.blend.interfaces import BlendOutput
from lmcache.blend.selection import Candidates, highest

NUM_HEADS, HEAD_SIZE = 2, 4


def rotate(positions, q, k):
    """Fake rotation that shows its position: multiplies K by (position + 1), in place as vLLM does."""
    factor = (positions + 1).view(-1, *[1] * (k.dim() - 1)).to(k)
    q.mul_(factor)
    k.mul_(factor)
    return q, k


def unrotate(positions, q, k):
    factor = (positions + 1).view(-1, *[1] * (k.dim() - 1)).to(k)
    q.div_(factor)
    k.div_(factor)
    return q, k


def executor(ratio: float, all_reduce=None) -> CacheBlendImpl:
    impl = CacheBlendImpl(ratio, all_reduce)
    impl.set_positional_encoder(rotate)
    impl.set_reverse_positional_encoder(unrotate)
    return impl


class Batch:
    """Requests of given lengths with their retrieved K and V; invalid rows are NaN."""

    def __init__(self, lengths: list[int], valid: list[bool], seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        self.num_tokens = sum(lengths)
        self.valid = torch.tensor(valid, dtype=torch.int)
        self.positions = torch.cat([torch.arange(n) for n in lengths])
        self.original = torch.where(self.valid.bool(), torch.randint(0, 99, (self.num_tokens,)), 0).int()

    def random(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, NUM_HEADS, HEAD_SIZE, generator=self.generator)

    def retrieved(self) -> torch.Tensor:
        return self.random(self.num_tokens).masked_fill(~self.valid.bool()[:, None, None], float("nan"))

    def blend(self, impl, layer, rk, rv, q, k, v, positions) -> BlendOutput:
        return impl.blend(layer, rk, rv, self.valid, self.original, q, k, v, positions, self.starts, 0)


def test_computes_all_tokens_if_nothing_was_retrieved():
    batch = Batch([3, 5], [False] * 8)
    impl = executor(0.15)
    for layer in range(4):
        q, k, v = (batch.random(8) for _ in range(3))
        output = batch.blend(impl, layer, None, None, q, k, v, batch.positions)
        assert torch.equal(output.q, q)
        assert torch.equal(output.k, k)
        assert torch.equal(output.v, v)
        assert torch.equal(output.positions, batch.positions)
        assert output.local_indices.tolist() == list(range(8))
        assert (output.query_start_loc is None) == (layer != 1)
    assert impl.indexes_in_kv.tolist() == list(range(8))


def test_refuses_missing_kv_after_retrieved_kv():
    batch = Batch([8], [True] * 8)
    impl = executor(0.5)
    batch.blend(impl, 1, *(batch.random(8) for _ in range(5)), positions=batch.positions)
    with pytest.raises(AssertionError, match="K and V are missing"):
        batch.blend(impl, 2, None, None, *(batch.random(4) for _ in range(3)), positions=batch.positions[:4])


def choose_slowly(batch: Batch, ratio: float, rv: torch.Tensor, fv: torch.Tensor) -> list[int]:
    """Select tokens in the simple way, one request and token at a time."""
    chosen = []
    starts = batch.starts.tolist()
    for start, end in pairwise(starts):
        valid = [i for i in range(start, end) if batch.valid[i]]
        valid.sort(key=lambda i: -((fv[i] - rv[i]) ** 2).mean().item())
        chosen += valid[: int(len(valid) * ratio)]
        chosen += [i for i in range(start, end) if not batch.valid[i]]
    return sorted(chosen)


@st.composite
def batches(draw) -> Batch:
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any))
    valid = draw(st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)))
    return Batch(lengths, valid, draw(st.integers(0, 9)))


RATIOS = st.sampled_from([0, 0.05, 0.15, 0.29, 0.5, 0.99, 1.0]) | st.floats(0, 1)


@given(batches(), RATIOS)
def test_three_layers_match_the_simple_selection(batch, ratio):
    impl = executor(ratio)
    q, k, v, rk, rv = (
        *(batch.random(batch.num_tokens) for _ in range(3)),
        batch.retrieved(),
        batch.retrieved(),
    )
    for layer in (0, 0):  # layer 0 has no state, so it may run repeatedly
        first = batch.blend(impl, layer, rk, rv, q, k, v, batch.positions)
        assert first.q is q
        assert first.k is k
        assert first.v is v
        assert first.positions is batch.positions
        assert first.local_indices.tolist() == list(range(batch.num_tokens))
        assert first.query_start_loc is None

    second = batch.blend(impl, 1, rk, rv, q, k, v, batch.positions)
    chosen = choose_slowly(batch, ratio, rv, v)
    assert impl.indexes_in_kv.tolist() == second.local_indices.tolist() == chosen
    assert torch.equal(second.q, q[chosen])
    assert second.k is k
    assert second.v is v
    assert torch.equal(second.positions, batch.positions[chosen])
    assert second.query_start_loc.dtype == batch.starts.dtype
    assert second.query_start_loc.tolist() == [sum(i < start for i in chosen) for start in batch.starts]

    for layer in (2, 3):
        rk, rv = batch.retrieved(), batch.retrieved()
        q, k, v = (batch.random(len(chosen)) for _ in range(3))
        third = batch.blend(impl, layer, rk, rv, q, k, v, second.positions)
        for token in range(batch.num_tokens):
            if token in chosen:
                assert torch.equal(third.k[token], k[chosen.index(token)])
                assert torch.equal(third.v[token], v[chosen.index(token)])
            else:
                rotated = rk[token] / (batch.original[token] + 1) * (batch.positions[token] + 1)
                assert torch.allclose(third.k[token], rotated)
                assert torch.equal(third.v[token], rv[token])
        assert third.q is q
        assert third.positions is second.positions
        assert third.local_indices.tolist() == list(range(len(chosen)))
        assert third.query_start_loc is None


def test_defect_06_undefined_rows_do_not_reduce_selected_valid_rows():
    batch = Batch([8], [True] * 4 + [False] * 4)
    v = batch.random(8)
    rv = v.clone()
    rv[0] += 1
    rv[1] += 2
    for undefined in (float("nan"), float("inf"), 1e30):
        rv[4:] = undefined
        impl = executor(0.5)
        out = batch.blend(impl, 1, v, rv, v, v, v, batch.positions)
        assert out.local_indices.tolist() == [0, 1, 4, 5, 6, 7]
    batch = Batch([4], [True] * 4)
    rv = v[:4] + torch.tensor([1, 0, float("nan"), 0])[:, None, None]
    out = batch.blend(executor(0.34), 1, rv, rv, v[:4], v[:4], v[:4], batch.positions)
    assert out.local_indices.tolist() == [0, 2], "a retrieved row that is not a number is computed"


def test_defect_26_executor_serves_several_batches():
    impl = executor(0.5)
    for seed in range(3):
        batch = Batch([6, 3], [True] * 9, seed)
        rv, v = batch.retrieved(), batch.random(9)
        out = batch.blend(impl, 1, rv, rv, v, v, v, batch.positions)
        assert impl.indexes_in_kv.tolist() == out.local_indices.tolist() == choose_slowly(batch, 0.5, rv, v)


def test_defect_26_retrieved_tensors_are_not_changed():
    batch = Batch([6], [True] * 5 + [False])
    impl = executor(0.5)
    rk, rv = batch.retrieved(), batch.retrieved()
    before = rk.clone(), rv.clone()
    q, k, v = (batch.random(6) for _ in range(3))
    out = batch.blend(impl, 1, rk, rv, q, k, v, batch.positions)
    selected = out.local_indices
    blended = batch.blend(impl, 2, rk, rv, q[selected], k[selected], v[selected], out.positions)
    blended.k.zero_()
    blended.v.zero_()
    assert torch.equal(rk.nan_to_num(7), before[0].nan_to_num(7))
    assert torch.equal(rv.nan_to_num(7), before[1].nan_to_num(7))


def test_tokens_may_be_any_dimension():
    batch = Batch([5, 4], [True] * 8 + [False])
    q, k, v, rk, rv = (batch.random(9) for _ in range(5))
    by_token, by_head = CacheBlendImpl(0.4), CacheBlendImpl(0.4)

    def blend(impl, dim, layer, tensors, positions):
        rk, rv, q, k, v = (tensor.movedim(0, dim) for tensor in tensors)
        return impl.blend(layer, rk, rv, batch.valid, batch.original, q, k, v, positions, batch.starts, dim)

    for dim in (1, 2):
        expected = blend(by_token, 0, 1, (rk, rv, q, k, v), batch.positions)
        blended = blend(by_head, dim, 1, (rk, rv, q, k, v), batch.positions)
        assert torch.equal(expected.q, blended.q.movedim(dim, 0))
        selected = expected.local_indices
        assert torch.equal(selected, blended.local_indices)
        short = (rk, rv, q[selected], k[selected], v[selected])
        expected, blended = (
            blend(by_token, 0, 2, short, expected.positions),
            blend(by_head, dim, 2, short, expected.positions),
        )
        assert torch.equal(expected.k, blended.k.movedim(dim, 0))
        assert torch.equal(expected.v, blended.v.movedim(dim, 0))


def test_ranks_select_by_the_sum_of_their_differences():
    batch = Batch([4], [True] * 3 + [False])
    fresh = torch.zeros(4, NUM_HEADS, HEAD_SIZE)
    differences = [torch.tensor([3.0, 0, 2, 0]), torch.tensor([0.0, 1, 2, 0])]
    for local, remote in permutations(differences):

        def all_reduce(difference, remote=remote):
            assert difference[3] == 0  # the undefined row is not sent to other ranks
            return difference + remote

        impl = executor(0.34, all_reduce)
        rv = local.sqrt()[:, None, None].repeat(1, NUM_HEADS, HEAD_SIZE)
        rv[3] = float("nan")
        out = batch.blend(impl, 1, rv, rv, fresh, fresh, fresh, batch.positions)
        assert out.local_indices.tolist() == [2, 3]


@given(st.integers(1, 200), RATIOS)
@example(100, 0.29)  # 28 in float64, 29 in float32
def test_number_of_selected_tokens_rounds_as_in_python(num_tokens, ratio):
    valid = torch.ones(num_tokens, dtype=torch.bool)
    tokens = Candidates(valid, torch.arange(num_tokens), torch.tensor([0, num_tokens]))
    selected = highest(torch.zeros(num_tokens), tokens, ratio)
    assert selected.nonzero().squeeze(1).tolist() == list(range(int(num_tokens * ratio)))


def test_half_precision_differences_do_not_overflow():
    v = torch.zeros(3, 1, 4, dtype=torch.float16)
    rv = torch.tensor([300.0, 400, 1], dtype=torch.float16)[:, None, None].expand_as(v)
    batch = Batch([3], [True] * 3)
    assert batch.blend(executor(0.34), 1, rv, rv, v, v, v, batch.positions).local_indices.tolist() == [1]


def test_without_encoders_k_is_reused_as_stored():
    batch = Batch([3], [True] * 3)
    impl = CacheBlendImpl(0)
    rk, v = batch.retrieved(), batch.random(3)
    batch.blend(impl, 1, rk, v, v, v, v, batch.positions)
    assert torch.equal(batch.blend(impl, 2, rk, v, v[:0], v[:0], v[:0], batch.positions[:0]).k, rk)


def test_refuses_inconsistent_arguments():
    with pytest.raises(ValueError, match="recompute_ratio"):
        CacheBlendImpl(1.5)
    batch = Batch([3], [True] * 3)
    v = batch.random(3)
    impl = executor(0)
    batch.blend(impl, 1, v, v, v, v, v, batch.positions)
    with pytest.raises(AssertionError, match="selection"):
        batch.blend(impl, 2, v, v, v, v, v, batch.positions)
    batch.starts = torch.tensor([0, 2])
    with pytest.raises(AssertionError, match="query_start_loc"):
        batch.blend(impl, 1, v, v, v, v, v, batch.positions)
