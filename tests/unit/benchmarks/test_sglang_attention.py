"""Attention of new tokens only: the results that SGLang's own function computes for these tokens."""

import runpy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from testing.sglang import environment

HEADS, KV_HEADS, HEAD_DIM, POOL_TOKENS = 4, 2, 8, 128
MODULE = runpy.run_path(str(environment.CPU / "attention_of_new_tokens.py"))


def attend_to_all(query, keys, values):
    """Return causal attention of all tokens of one prompt: ``query`` has one row for each key."""
    heads_first = (tensor.movedim(0, 1).unsqueeze(0) for tensor in (query, keys, values))
    result = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True, scale=0.5)
    return result.squeeze(0).movedim(1, 0)


class Original:
    """Stands in for SGLang's function, and records the prompts that it gets."""

    def __init__(self) -> None:
        self.lengths: list[list[int]] = []

    def __call__(
        self, _, query, output, k_cache, v_cache, tables, rows, lengths, prefixes, new, encoded, **__
    ):
        self.lengths.append(lengths.tolist())
        for number, row in enumerate(rows.tolist()):
            tokens = tables[row, : lengths[number]]
            all_queries = torch.zeros(len(tokens), HEADS, HEAD_DIM)
            all_queries[prefixes[number] :] = query
            everything = attend_to_all(all_queries, k_cache[tokens], v_cache[tokens])
            output[:] = everything[prefixes[number] :]
        return output


@pytest.fixture
def original() -> Original:
    return Original()


def run(original, lengths, new, **options):
    """Run the replacement for prompts of these lengths, and return its output and the expected one."""
    torch.manual_seed(0)
    k_cache, v_cache = torch.randn(2, POOL_TOKENS, KV_HEADS, HEAD_DIM).unbind()
    tables = torch.stack([torch.randperm(POOL_TOKENS) for _ in range(len(lengths) + 1)])
    rows = torch.arange(1, len(lengths) + 1)
    query = torch.randn(sum(new), HEADS, HEAD_DIM)
    sizes = torch.tensor(lengths), torch.tensor(lengths) - torch.tensor(new), torch.tensor(new)
    output = torch.full_like(query, torch.nan)
    options = {"scaling": 0.5, "enable_gqa": True, "causal": True, **options}
    extend = MODULE["_replacement"](original)
    extend(None, query, output, k_cache, v_cache, tables, rows, *sizes, None, **options)
    expected = torch.empty_like(query)
    for number, part in enumerate(query.split(new)):
        start = sum(new[:number])
        prompt = rows[number : number + 1], *(size[number : number + 1] for size in sizes)
        output_part = expected[start : start + len(part)]
        Original()(None, part, output_part, k_cache, v_cache, tables, *prompt, encoded=None)
    return output, expected


def test_results_of_a_hit_are_those_of_sglang(original):
    output, expected = run(original, [100], [16])
    torch.testing.assert_close(output, expected)
    assert original.lengths == []


def test_prompts_of_one_batch_are_computed_separately(original):
    output, expected = run(original, [100, 40, 70], [16, 40, 3])
    torch.testing.assert_close(output, expected)
    assert original.lengths == [[40]]


@pytest.mark.parametrize(
    "options", [{"sliding_window_size": 16}, {"causal": False}, {"is_cross_attn": True}], ids=str
)
def test_other_kinds_of_attention_are_sglangs_own(original, options):
    run(original, [100], [16], **options)
    assert original.lengths == [[100]]
