"""Blending with a small model in vLLM's forward context: passes, slices, and the test at the start."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import ReduceOp

from lmcache_client.core.blend_jobs import Blended, BlendJob
from lmcache_client.errors import UnsupportedError
from lmcache_client.vllm.blend import blender as module
from lmcache_client.vllm.blend import ranks, self_test
from lmcache_client.vllm.blend.passes import row_starts
from tests.harness.client.blend_model import TOKENS, VOCAB, Impl, Model, Rank, difference, one_rank

__all__ = ["one_rank"]

SYSTEM, DOCUMENTS, QUESTION = 6, (22, 33, 25), 9
NUM_TOKENS = SYSTEM + sum(DOCUMENTS) + QUESTION
TABLE = tuple(range(50, 50 + -(-NUM_TOKENS // TOKENS)))
SELECTIONS = "all", "deviation", "attended", "first", "none"


PROMPT = [(7 * n * n + n) % VOCAB for n in range(NUM_TOKENS)]


def starts():
    return [SYSTEM + sum(DOCUMENTS[:n]) for n in range(len(DOCUMENTS) + 1)]


class Work:
    """One prompt to blend, whose documents are computed alone and placed."""

    def __init__(self, rank, missing=(), **changes):
        self.rank, blender = rank, rank.blender
        self.job = replace(
            BlendJob("r", tuple(PROMPT), TABLE, 0, SYSTEM, starts()[-1], NUM_TOKENS - 1, (), "all", 0.3),
            **changes,
        )
        self.full = rank.kv(rank.prefill(PROMPT), NUM_TOKENS - 1)
        self.is_placed = torch.zeros(NUM_TOKENS - 1, dtype=torch.bool)
        self.stored_at = torch.zeros(NUM_TOKENS - 1, dtype=torch.long)
        documents = [(0, SYSTEM), *zip(starts(), DOCUMENTS, strict=False)]
        stored = [(start, rank.prefill(PROMPT[start : start + length])) for start, length in documents]
        for pages in blender.pages.values():  # blocks have the KV of other requests
            pages.bytes[list(TABLE)] = 7
            pages.bytes[list(TABLE[: self.job.begin // TOKENS])] = 0
        engine = rank.prefill(PROMPT[: self.job.begin]) if self.job.begin else {}
        for name, content in engine.items():
            blender.pages[name].bytes[list(TABLE[: len(content)])] = content
        for (start, content), (_, length) in zip(stored, documents, strict=True):
            begin, end = max(start, self.job.begin), start + length
            if start in missing or begin >= end:
                continue
            for name, staged in blender.staged.items():
                staged[3 : 3 + len(content[name])] = content[name]
            blender.place(self.job, begin, end, start, 3 * TOKENS + begin - start)
            self.is_placed[begin:end] = True
            self.stored_at[begin:end] = torch.arange(begin - start, length)

    def run(self, budget=1000):
        """Run all slices. Returns the result, the tokens of each pass, and the KV."""
        work = self.rank.blender.blend(self.job, self.is_placed, self.stored_at)
        assert next(work) == 0
        assert work.send(0) == 0, "without a budget, nothing is computed"
        passes = []
        while True:
            try:
                passes.append(work.send(budget))
            except StopIteration as end:
                return end.value, passes, self.kv()
            assert 0 < passes[-1] <= budget

    def kv(self):
        content = {name: pages.bytes[list(TABLE)] for name, pages in self.rank.blender.pages.items()}
        return self.rank.kv(content, NUM_TOKENS - 1)


@pytest.fixture(scope="module")
def shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "get_tp_group", lambda: SimpleNamespace(world_size=1))
        return Rank(max_tokens=200)


@pytest.mark.parametrize(("order", "is_packed"), [("LBHNC", False), ("LBHNC", True), ("BLNHC", False)])
def test_everything_recomputed_is_a_full_prefill_in_any_layout(order, is_packed):
    work = Work(Rank(order, is_packed))
    result, _, kv = work.run()
    assert result == Blended(0, sum(DOCUMENTS), QUESTION - 1)
    assert difference(kv, work.full) < 1e-5


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("begin", [0, 8])
def test_slices_compute_the_same_kv(shared, selection, begin):
    def run(budget):
        return Work(shared, selection=selection, begin=begin, missing={starts()[1]}).run(budget)

    result, _, kv = run(1000)
    sliced_result, passes, sliced = run(13)
    assert len(passes) > 2
    assert sliced_result == result
    assert difference(sliced, kv) < 1e-5


@pytest.mark.parametrize("selection", SELECTIONS)
def test_exact_and_chosen_tokens(shared, selection):
    work = Work(shared, selection=selection, ratio=0.25)
    result, _, kv = work.run()
    quota = {"all": sum(DOCUMENTS), "none": 0}.get(selection, sum(DOCUMENTS) // 4)
    first_16 = 0 if selection in ("none", "all") else 16 - SYSTEM  # the system prompt is exact
    assert quota <= result.recomputed <= quota + first_16
    assert result.reused + result.recomputed == sum(DOCUMENTS)
    assert result.missing == QUESTION - 1
    exact = SYSTEM if selection == "none" else 16
    assert (
        difference({n: x[:, :exact] for n, x in kv.items()}, {n: x[:, :exact] for n, x in work.full.items()})
        < 1e-5
    )
    assert (difference(kv, work.full) > 0.01) == (selection != "all")


def test_document_at_the_beginning_is_never_computed(shared):
    work = Work(shared, selection="deviation", ratio=1.0, documents=0)
    result, passes, kv = work.run()
    assert result == Blended(SYSTEM, sum(DOCUMENTS), QUESTION - 1)
    assert sum(passes) == 2 * sum(DOCUMENTS) + QUESTION - 1
    assert difference(kv, work.full) < 1e-5


def test_tokens_without_stored_kv_are_computed(shared):
    work = Work(shared, missing={0, *starts()})
    result, _, kv = work.run()
    assert result == Blended(0, 0, NUM_TOKENS - 1)
    assert difference(kv, work.full) < 1e-5


def test_comparison_of_v_ends_after_two_layers(shared):
    work = Work(shared, selection="deviation", ratio=0.0, missing={0})
    shared.names_of_pass.clear()
    slices = shared.blender.blend(work.job, work.is_placed, work.stored_at)
    next(slices)
    assert slices.send(1000) > 0
    assert shared.names_of_pass == list(shared.layers)[:2]
    shared.names_of_pass.clear()
    assert slices.send(1000) > 0
    assert shared.names_of_pass == list(shared.layers)


def test_passes_compute_no_attention_of_the_last_layer(shared, monkeypatch):
    """Nothing reads it: the engine computes the last token, which reads K and V."""
    work, calls = Work(shared, missing={0, *starts()}), []
    *_, last = shared.layers.values()
    monkeypatch.setattr(last, "impl", Impl())
    monkeypatch.setattr(last.impl, "forward", lambda *_, **options: calls.append("computed"))
    assert difference(work.run()[2], work.full) < 1e-5
    assert not calls


def test_question_is_computed_once_if_nothing_before_it_changes(shared):
    work = Work(shared, selection="attended", ratio=0.0, documents=20)
    work.stored_at[:20] = torch.arange(20)  # as if an exact prefix reached behind the first 16 tokens
    result, passes, _ = work.run()
    assert result == Blended(sum(DOCUMENTS) + SYSTEM - 20, 0, QUESTION - 1)
    assert passes == [QUESTION], "and the last token, for its attention"


def test_last_token_without_a_block_is_not_observed(shared):
    blocks = TABLE[: (NUM_TOKENS - 1) // TOKENS]
    tokens = len(blocks) * TOKENS
    work = Work(shared, selection="attended")
    job = replace(work.job, tokens=tuple(PROMPT[: tokens + 1]), blocks=blocks, end=tokens)
    slices = shared.blender.blend(job, work.is_placed[:tokens], work.stored_at[:tokens])
    next(slices)
    assert slices.send(1000) == tokens - starts()[-1]


def test_passes_are_limited_by_tokens_and_rows():
    rank = Rank(max_tokens=40)
    passes, rows = rank.blender.passes, torch.tensor([0, 1, 5, 9, 10, 11, 20, 21, 30])
    passes.max_rows = 4
    assert passes.fitting(torch.arange(100)) == (40, 40)
    assert passes.fitting(torch.arange(100), 7) == (7, 7)
    assert passes.fitting(torch.arange(100), 0) == (1, 1)
    assert passes.fitting(rows) == (8, 8 + 3 * 4)
    assert passes.fitting(rows, 8 + 3 * 4 - 1) == (7, 7 + 3 * 4)
    assert passes.fitting(rows, 8 + 2 * 4) == (6, 6 + 2 * 4)
    work = Work(rank, selection="first")
    assert difference(work.run()[2], Work(rank, selection="first").run(9)[2]) < 1e-5


def test_prompts_in_turns_do_not_disturb_one_another(shared):
    works = [Work(shared, selection=name) for name in ("deviation", "attended")]
    alone = [work.run() for work in works]
    other = tuple(range(20, 20 + len(TABLE)))
    first = Work(shared, selection="deviation")
    second = Work(shared, selection="attended")
    moved = replace(second.job, blocks=other)
    for pages in shared.blender.pages.values():
        pages.bytes[list(other)] = pages.bytes[list(TABLE)]
    # Both prompts now have the same placed KV, in blocks of their own.
    slices = [
        shared.blender.blend(first.job, first.is_placed, first.stored_at),
        shared.blender.blend(moved, second.is_placed, second.stored_at),
    ]
    results = {}
    for generator in slices:
        next(generator)
    while len(results) < 2:
        for number, generator in enumerate(slices):
            if number not in results:
                try:
                    generator.send(6)
                except StopIteration as end:
                    results[number] = end.value
    assert [results[0], results[1]] == [result for result, _, _ in alone]
    assert difference(first.kv(), alone[0][2]) < 1e-5


def test_kv_is_placed_on_return_also_after_an_error(shared, monkeypatch):
    """Kernels of a stream that still run could overwrite KV that the model computes later."""
    calls = []

    class Stream:
        def synchronize(self):
            calls.append("synchronized")

    def write(*_):
        calls.append("queued")
        if len(calls) == 2:
            raise torch.OutOfMemoryError

    work = Work(shared)
    for pages in shared.blender.pages.values():
        monkeypatch.setattr(pages, "write", write)
    monkeypatch.setattr(shared.blender, "_stream", Stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    with pytest.raises(torch.OutOfMemoryError):
        shared.blender.place(work.job, SYSTEM, SYSTEM + 1, SYSTEM, 0)
    assert calls == ["queued", "queued", "synchronized"]


def test_ranks_agree_on_the_tokens_that_all_have_placed(shared, monkeypatch):
    work = Work(shared, selection="first")
    of_other_rank = work.is_placed.clone()
    of_other_rank[starts()[1] :] = False

    def reduce(values, operation):
        return values.minimum(of_other_rank.to(values.dtype)) if values.dtype == torch.uint8 else values

    monkeypatch.setattr(module, "of_all_ranks", reduce)
    result, _, _ = work.run()
    assert result.reused + result.recomputed == DOCUMENTS[0]


def test_damaged_kv_of_one_rank_is_computed(shared, monkeypatch):
    """A reduction to the largest value may drop a NaN."""
    work = Work(shared, selection="attended", ratio=0.0)
    for pages in shared.blender.pages.values():
        pages.bytes[TABLE[starts()[1] // TOKENS]] = 255  # NaN

    def reduce(values, operation):
        return values.fmax(torch.zeros_like(values)) if operation == ReduceOp.MAX else values

    monkeypatch.setattr(module, "of_all_ranks", reduce)
    result, _, kv = work.run()
    assert result == Blended(0, sum(DOCUMENTS), QUESTION - 1)
    assert difference(kv, work.full) < 1e-5


def without_table(model):
    for block in model.blocks:
        block.rotary_emb.cos_sin_cache = None


def with_another_table(model):
    for block in model.blocks:
        block.rotary_emb.cos_sin_cache = model.table.flip(0)


def with_positions_in_v(model):
    model.embed, rotate = model.embedding, model._rotate
    model._rotate = lambda x, positions: rotate(x, positions) + positions[:, None, None]


@pytest.mark.parametrize("change", [without_table, with_another_table, with_positions_in_v])
def test_model_whose_k_cannot_be_moved_is_refused(change):
    with pytest.raises(UnsupportedError, match=r"layers\.0\.attn: its K can't be moved"):
        Rank(change=change)


def test_rotation_of_a_layer_that_does_not_use_it_is_dropped():
    def change(model):
        rotate, calls = model._rotate, []

        def first_layer_only(x, positions):
            calls.append(x)
            return rotate(x, positions) if (len(calls) - 1) // 2 % 3 == 0 else x

        model._rotate = first_layer_only

    rank = Rank(change=change)
    assert list(rank.blender.rotations) == [next(iter(rank.layers))]
    work = Work(rank)
    assert difference(work.run()[2], work.full) < 1e-5


def test_kernel_that_ignores_rows_is_refused():
    def change(model):
        class OneRow(Impl):
            def forward(self, layer, query, key, value, cache, metadata, output):
                first_row = SimpleNamespace(
                    query_start_loc_cpu=torch.tensor([0, len(query)]),
                    seq_lens=metadata.seq_lens[-1:].clamp(min=len(query)),
                    block_table_tensor=metadata.block_table_tensor[-1:],
                )
                return super().forward(layer, query, key, value, cache, first_row, output)

        for block in model.blocks:
            block.attn.impl = OneRow()

    with pytest.raises(UnsupportedError, match="a pass over parts of a prompt computes other KV"):
        Rank(change=change)


def test_self_test_restores_the_blocks():
    rank = Rank()
    assert not any(pages.bytes.any() for pages in rank.blender.pages.values())


def test_second_model_around_the_layers_is_refused():
    outer = []

    def change(model):
        other = Model({}, None)
        other.blocks.extend(model.blocks)
        outer.append(other)

    with pytest.raises(UnsupportedError, match="2 models contain all layers of the KV; start vLLM without"):
        Rank(change=change)


def test_model_with_another_order_of_layers_is_refused():
    with pytest.raises(UnsupportedError, match="does not show its queries, layer by layer"):
        Rank(change=lambda model: model.names.reverse())


def test_failure_on_another_rank_refuses_blending_here(monkeypatch):
    monkeypatch.setattr(ranks, "of_all_ranks", lambda values, operation: values * 0)
    with pytest.raises(UnsupportedError, match="another tensor parallel rank"):
        Rank()


@pytest.mark.parametrize(("single", "run_tokens"), [(1.4, 1), (1.6, 16)])
def test_runs_are_selected_if_the_kernel_is_slow_with_single_tokens(monkeypatch, single, run_tokens):
    rank = Rank(max_tokens=300)
    rows, passes = [], rank.blender.passes
    monkeypatch.setattr(passes, "run", lambda tokens, places, *args: rows.append(row_starts(places)))

    def seconds(work, device):
        work()
        return single if len(rows[-1]) == 256 else 1.0

    monkeypatch.setattr(self_test, "_seconds", seconds)
    rank.config.model_config.max_model_len = 4096
    assert self_test.SelfTest(rank.blender, rank.config).choose_run_tokens() == run_tokens
    assert [len(starts) for starts in rows] == [256, 16]


def test_selections_take_runs_of_the_chosen_length(shared, monkeypatch):
    monkeypatch.setattr(shared.blender, "run_tokens", 8)
    chosen = []
    run = shared.blender.passes.run

    def noted(tokens, places, *args, **options):
        chosen.append(places)
        run(tokens, places, *args, **options)

    monkeypatch.setattr(shared.blender.passes, "run", noted)
    Work(shared, selection="first", ratio=0.2, missing={0}).run()
    assert len(row_starts(chosen[-1])) <= 5
