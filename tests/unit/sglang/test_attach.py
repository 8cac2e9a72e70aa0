"""Options with which SGLang is not attached, and ids of engines. SGLang's options are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lmcache.engines.errors import UnsupportedError
from lmcache.engines.sglang import attach
from lmcache.engines.sglang.options import Settings


def make_config(tp_size=1, **fields):
    values = {
        "tp_rank": 0, "tp_size": tp_size, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "dcp_size": 1, "dp_rank": 0, "is_mla_model": False, "is_storage_writer": True,
        "should_split_heads": False, "extra_config": {"interface_v1": 1},
    }  # fmt: skip
    return SimpleNamespace(**(values | fields))


@pytest.fixture
def attach_with(monkeypatch):
    """``attach_with(config, **options)``: attach a rank of an engine with these options of SGLang."""

    def run(config, **options):
        monkeypatch.setattr(attach, "EngineOptions", lambda: SimpleNamespace(**options))
        return attach.attach(config, {"kv": SimpleNamespace(page_size=1)}, Settings())

    return run


@pytest.mark.parametrize("extra_config", [None, {}, {"interface_v1": 0}])
def test_engine_that_passes_no_pages_is_refused(attach_with, extra_config):
    with pytest.raises(UnsupportedError, match='add "interface_v1": 1 to'):
        attach_with(make_config(extra_config=extra_config), nnodes=1)


def test_page_on_several_machines_is_refused(attach_with):
    with pytest.raises(UnsupportedError, match="is on 2 machines"):
        attach_with(make_config(tp_size=2), nnodes=2)


def test_replicas_on_several_machines_are_not_refused(attach_with):
    with pytest.raises(UnsupportedError, match="too small"):  # the next check
        attach_with(make_config(tp_size=2, is_mla_model=True), nnodes=2)


def test_ranks_share_the_id_of_their_replica_only():
    """The replicas of ``--dp-size`` are engines of their own, with the same parent and the same options."""

    def uuid(replica, dp_rank=0):
        engine = SimpleNamespace(random_seed=1, port=30000, dp_rank=replica)
        return attach.engine_uuid(engine, dp_rank, is_alone=False)

    assert uuid(0) == uuid(0)
    assert len({uuid(0), uuid(1), uuid(None), uuid(None, dp_rank=1)}) == 4
