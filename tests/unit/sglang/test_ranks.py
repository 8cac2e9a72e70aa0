"""Places of SGLang's ranks in the columns of a row, ids of engines, and engines that are refused."""

import itertools
from types import SimpleNamespace

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lmcache_client.errors import UnsupportedError
from lmcache_client.sglang import attach
from lmcache_client.sglang.attach import is_reporter
from lmcache_client.sglang.options import SGLangSettings
from lmcache_client.sglang.ranks import Ranks


def config(**fields):
    """SGLang's HiCacheStorageConfig of one rank."""
    defaults = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "dcp_size": 1, "dp_rank": 0, "is_mla_model": False, "should_split_heads": False,
        "extra_config": {"interface_v1": 1},
    }  # fmt: skip
    made = SimpleNamespace(**(defaults | fields))
    made.is_storage_writer = not made.is_mla_model or made.tp_rank == 0
    return made


def all_ranks(tp, pp, cp, *, is_mla=False):
    sizes = {"tp_size": tp, "pp_size": pp, "attn_cp_size": cp, "is_mla_model": is_mla}
    places = itertools.product(range(tp), range(pp), range(cp))
    return [Ranks.of(config(**sizes, tp_rank=t, pp_rank=p, attn_cp_rank=c), {"kv"}) for t, p, c in places]


sizes = st.integers(1, 4)


@given(sizes, sizes, sizes)
def test_each_rank_has_a_column_of_its_own(tp, pp, cp):
    ranks = all_ranks(tp, pp, cp)
    assert sorted(rank.column for rank in ranks) == list(range(tp * pp * cp))
    for rank in ranks:
        assert rank.num_columns == rank.num_ranks == tp * pp * cp
        assert (rank.num_replicas, rank.is_replica) == (1, False)
        assert rank.sizes == {"tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp}
    assert sum(rank.is_first for rank in ranks) == 1


@given(sizes, sizes, sizes)
def test_ranks_with_the_same_kv_share_a_column_that_one_of_them_writes(tp, pp, cp):
    ranks = all_ranks(tp, pp, cp, is_mla=True)
    for column in range(pp * cp):
        members = [rank for rank in ranks if rank.column == column]
        assert (len(members), sum(not rank.is_replica for rank in members)) == (tp, 1)
    for rank in ranks:
        assert rank.num_columns == pp * cp
        assert (rank.num_replicas, rank.num_ranks) == (tp, tp * pp * cp)
        assert rank.sizes["tensor_parallel"] == 1
    assert sum(rank.is_first for rank in ranks) == 1


def test_sizes_that_divide_kv_differently_have_different_sizes():
    ranks = [all_ranks(*numbers)[0] for numbers in itertools.product([1, 2], repeat=3)]
    assert len({tuple(sorted(rank.sizes.items())) for rank in ranks}) == 8


def test_one_rank_reports():
    assert is_reporter(config())
    assert is_reporter(config(tp_size=2))
    assert not is_reporter(config(tp_size=2, tp_rank=1))
    assert not is_reporter(config(tp_size=2, tp_rank=1, is_mla_model=True))
    assert not is_reporter(config(pp_size=2, pp_rank=1))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dcp_size": 2, "is_mla_model": True, "tp_size": 2}, "decode context parallelism"),
        ({"should_split_heads": True}, "tp_lcm_size is not supported"),
    ],
)
def test_other_divisions_of_kv_are_refused(fields, message):
    with pytest.raises(UnsupportedError, match=message):
        Ranks.of(config(**fields), {"kv"})


@pytest.mark.parametrize("pool", ["mamba", "draft"])
def test_split_pool_next_to_replicated_kv_is_refused(pool):
    pools = {"kv", pool}
    Ranks.of(config(tp_size=1, is_mla_model=True), pools)
    Ranks.of(config(tp_size=2), pools)
    with pytest.raises(UnsupportedError, match=f"not its pool {pool}: use --tp-size 1"):
        Ranks.of(config(tp_size=2, is_mla_model=True), pools)


@pytest.mark.parametrize(
    ("fields", "num_nodes", "message"),
    [
        *(
            ({"extra_config": extra_config}, 1, 'add "interface_v1": 1 to')
            for extra_config in (None, {}, {"interface_v1": 0})
        ),
        ({"tp_size": 2}, 2, "is on 2 machines"),
        ({"tp_size": 2, "is_mla_model": True}, 2, "too small"),  # replicas may be: this is the next check
    ],
)
def test_engine_that_passes_no_pages_or_parts_of_them_on_other_machines_is_refused(
    monkeypatch, fields, num_nodes, message
):
    monkeypatch.setattr(attach, "EngineOptions", lambda: SimpleNamespace(enable_lora=False, nnodes=num_nodes))
    with pytest.raises(UnsupportedError, match=message):
        attach.attach(config(**fields), {"kv": SimpleNamespace(page_size=1)}, SGLangSettings())


def test_groups_begin_with_the_pools_of_full_attention():
    pools = dict.fromkeys(["mamba", "swa", "indexer", "draft", "kv"])
    assert attach.groups_of(pools) == ["kv", "draft", "indexer", "mamba", "swa"]
    with pytest.raises(UnsupportedError, match="a pool that can't be cached yet: other"):
        attach.groups_of(pools | {"other": None})
